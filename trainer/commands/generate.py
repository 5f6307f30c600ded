"""Write text with a trained model.

Example: stageline generate --checkpoint outputs/debug --prompt "def main" --max-new-tokens 200

The checkpoint is a run folder, of which the latest valid checkpoint is taken, one of its step-N folders, or a Hugging
Face folder. Prompts are given with --prompt, which may come several times ("-": standard input is one), or with
--prompts, one on each line of a file ("-": of standard input); without any, the model begins a document of its own.
Several are continued together, --batch-size at a time, and come in their order, under a line of their own each.

Temperature 0 always takes the most likely token. The same seed gives the same text again, whatever other prompts are
beside it. docs/generate-and-evaluate.md says more.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.commands.arguments import natural, positive
from trainer.errors import ConfigurationError, ExitCode, StagelineError

if TYPE_CHECKING:
    from trainer.inference import InferenceModel
    from trainer.text_stream import TextStream


def run(argv: list[str]) -> int:
    """Generate as the arguments say; the text goes to standard output, everything else to standard error.

    Returns the exit code: 2 if there is no valid checkpoint or no tokenizer.
    """
    arguments = _parse(argv)
    try:
        _generate(arguments)
    except StagelineError as error:
        _note(f"stageline generate: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        print()
    return ExitCode.DONE


def _generate(arguments: argparse.Namespace) -> None:
    # Imports torch: only once the command line is known to be right.
    from trainer.inference import find_model

    found = find_model(arguments.checkpoint)
    for problem in found.passed_over:
        _note(f"passed over: {problem}")
    _note(found.description)
    prompts = _prompts(arguments)
    loaded = found.load(arguments.dtype)
    tokens, started = 0, time.perf_counter()
    for first in range(0, len(prompts), arguments.batch_size):
        batch = prompts[first : first + arguments.batch_size]
        tokens += _write_batch(arguments, loaded, batch, first, len(prompts))
    seconds = time.perf_counter() - started
    _note(f"{tokens} tokens in {seconds:.1f} s ({tokens / seconds:.0f} tokens/s)")


def _parse(argv: list[str]) -> argparse.Namespace:
    from trainer.inference import DTYPES

    parser = argparse.ArgumentParser(
        "stageline generate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--checkpoint", type=Path, required=True, help="run folder, step-N folder or Hugging Face folder"
    )
    parser.add_argument("--prompt", action="append", default=[], help="text to continue (default: none)")
    parser.add_argument("--prompts", metavar="FILE", help="a file with a prompt on each line")
    parser.add_argument("--max-new-tokens", type=positive, default=200, help="default 200")
    parser.add_argument("--temperature", type=_not_negative, default=0.8, help="default 0.8; 0: most likely")
    parser.add_argument("--top-k", type=positive, help="draw among the k most likely tokens only")
    parser.add_argument(
        "--top-p", type=_probability, help="draw among the most likely tokens of this probability"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the draws; default 0. Prompt i has seed + i, from 0"
    )
    parser.add_argument(
        "--stop-token",
        type=natural,
        action="append",
        default=[],
        metavar="ID",
        help="a token that ends a text, beside the model's own",
    )
    parser.add_argument("--batch-size", type=positive, default=8, help="prompts at a time; default 8")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of the parameters; default auto")
    parser.add_argument("--json", action="store_true", help="one JSON object for each prompt, on a line")
    return parser.parse_args(argv)


def _prompts(arguments: argparse.Namespace) -> list[str]:
    """All prompts, those of --prompt first. Raises ConfigurationError for a file that cannot be read."""
    prompts = [sys.stdin.read() if text == "-" else text for text in arguments.prompt]
    if arguments.prompts is not None:
        prompts += _lines(arguments.prompts)
    return prompts or [""]


def _lines(file: str) -> list[str]:
    if file == "-":
        return sys.stdin.read().splitlines()
    try:
        return Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--prompts {file}: cannot be read: {error}") from error


def _write_batch(
    arguments: argparse.Namespace, loaded: InferenceModel, prompts: Sequence[str], first: int, total: int
) -> int:
    """Continue some of `total` prompts, `first` being the index of the first of them; how many tokens they got."""
    from trainer.generation import Continuation
    from trainer.sampling import Sampling
    from trainer.text_stream import TextStream

    encoded = [loaded.prompt(text) for text in prompts]
    if max(map(len, encoded)) + arguments.max_new_tokens > loaded.longest:
        _note(f"beyond {loaded.longest} tokens, the length that it was trained with, the text gets worse")
    texts = Continuation(
        loaded.model,
        encoded,
        arguments.max_new_tokens,
        Sampling(arguments.temperature, arguments.top_k, arguments.top_p),
        seeds=range(arguments.seed + first, arguments.seed + first + len(prompts)),
        stop=loaded.stop | set(arguments.stop_token),
    )
    streams = [TextStream(loaded.tokenizer) for _ in prompts]
    written = _JsonLines(prompts) if arguments.json else _Terminal(prompts, first, total)
    count = 0
    while not texts.done:
        for index, token in enumerate(texts.step()):
            if token is None:
                written.end(index, streams[index])
            else:
                count += 1
                written.add(index, streams[index].add(token))
    for index, stream in enumerate(streams):
        written.end(index, stream)
    return count


class _Terminal:
    """Texts that grow side by side, one below the other: the first that has not ended is printed as it grows."""

    def __init__(self, prompts: Sequence[str], first: int, total: int) -> None:
        self._prompts = prompts
        self._first = first
        self._total = total
        self._waiting = [""] * len(prompts)  # texts that have not been printed
        self._ended = [False] * len(prompts)
        self._current = 0
        self._begin()

    def add(self, index: int, text: str) -> None:
        """More text of the prompt of this index."""
        if index == self._current:
            print(text, end="", flush=True)
        else:
            self._waiting[index] += text

    def end(self, index: int, stream: TextStream) -> None:
        """The text has ended, but for what its stream held back. Again: nothing."""
        if self._ended[index]:
            return
        self.add(index, stream.rest())
        self._ended[index] = True
        while self._current < len(self._prompts) and self._ended[self._current]:
            print(flush=True)
            self._current += 1
            self._begin()

    def _begin(self) -> None:
        index = self._current
        if index == len(self._prompts):
            return
        if self._total > 1:
            print(f"--- {self._first + index + 1} of {self._total}")
        print(self._prompts[index] + self._waiting[index], end="", flush=True)


class _JsonLines:
    """An object for each text, printed once all of a batch have ended."""

    def __init__(self, prompts: Sequence[str]) -> None:
        self._prompts = prompts
        self._texts = [""] * len(prompts)
        self._ended = [False] * len(prompts)

    def add(self, index: int, text: str) -> None:
        self._texts[index] += text

    def end(self, index: int, stream: TextStream) -> None:
        if self._ended[index]:
            return
        self._texts[index] += stream.rest()
        self._ended[index] = True
        if all(self._ended):
            for prompt, text in zip(self._prompts, self._texts, strict=True):
                print(json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False), flush=True)


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _not_negative(text: str) -> float:
    value = _number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, got {text!r}")
    return value


def _probability(text: str) -> float:
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0 and up to 1, got {text!r}")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None
