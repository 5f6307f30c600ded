"""Write text with a trained model.

Example: stageline generate --checkpoint outputs/debug --prompt "def main" --max-new-tokens 200

The checkpoint is a run folder, of which the latest valid checkpoint is taken, or one of its step-N folders.
Without --prompt the model begins a document of its own. Temperature 0 always takes the most likely token; with
the same seed the same text comes again.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.errors import ExitCode, StagelineError

if TYPE_CHECKING:
    from trainer.checkpoint.weights import TrainedModel
    from trainer.data.tokenizer import Tokenizer


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
    from trainer.checkpoint.weights import find_trained_model

    trained = find_trained_model(arguments.checkpoint)
    for problem in trained.passed_over:
        _note(f"passed over: {problem}")
    tokenizer = _tokenizer(trained)
    model = trained.config.model
    _note(f"{model.name} {model.flavor} after {trained.step} steps, from {trained.step_folder}")
    _write(arguments, trained, tokenizer)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "stageline generate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="run folder or step-N folder")
    parser.add_argument("--prompt", default="", help="text to continue (default: none)")
    parser.add_argument("--max-new-tokens", type=_positive, default=200, help="default 200")
    parser.add_argument("--temperature", type=_not_negative, default=0.8, help="default 0.8; 0: most likely")
    parser.add_argument("--top-k", type=_positive, help="draw among the k most likely tokens only")
    parser.add_argument(
        "--top-p", type=_probability, help="draw among the most likely tokens of this probability"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draws; default 0")
    return parser.parse_args(argv)


def _write(arguments: argparse.Namespace, trained: TrainedModel, tokenizer: Tokenizer) -> None:
    import torch

    from trainer.checkpoint.weights import load_model
    from trainer.generation import Sampling, TextStream, generate

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(trained, device)
    prompt = _prompt(arguments.prompt, trained, tokenizer)
    longest = trained.config.training.seq_len
    if len(prompt) + arguments.max_new_tokens > longest:
        _note(f"beyond {longest} tokens, the length that it was trained with, the text gets worse")
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p)
    stream = TextStream(tokenizer)
    tokens = 0
    started = time.perf_counter()
    print(arguments.prompt, end="", flush=True)
    for token in generate(
        model, prompt, arguments.max_new_tokens, sampling, arguments.seed, stop=tokenizer.eos_id
    ):
        print(stream.add(token), end="", flush=True)
        tokens += 1
    print(stream.rest())
    seconds = time.perf_counter() - started
    _note(f"{tokens} tokens in {seconds:.1f} s ({tokens / seconds:.0f} tokens/s)")


def _tokenizer(trained: TrainedModel) -> Tokenizer:
    from trainer.data.tokenizer import load_tokenizer
    from trainer.run_folder import RunFolder

    # Without one in the configuration, the run has trained its own.
    return load_tokenizer(trained.config.model.tokenizer_path or RunFolder(trained.run_folder).tokenizer)


def _prompt(text: str, trained: TrainedModel, tokenizer: Tokenizer) -> list[int]:
    """The tokens of the prompt, begun as the documents in training were."""
    tokens = tokenizer.encode(text, bos=trained.config.data.add_bos, eos=False)
    if tokens:
        return tokens
    # No prompt, and documents begin with nothing: what comes before a document is the end of another.
    between = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
    return [0 if between is None else between]


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


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
