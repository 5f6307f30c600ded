"""Measure how good a model is: its loss on a text, or tasks of lm-eval.

Example: stageline evaluate outputs/debug --file book.txt
Example: stageline evaluate outputs/llama-3.2-1b --tasks hellaswag,arc_easy --limit 200

CHECKPOINT is a run folder, of which the latest valid checkpoint is taken, one of its step-N folders, or a Hugging Face
folder. With --file, the loss per token, bits per byte and perplexity of the file as one document; with a --stride below
the window, each token is given more context. With --tasks, the results of the package lm-eval, which
`pip install stageline[eval]` installs; --task-path is a folder with tasks of your own.
docs/generate-and-evaluate.md says more.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.commands.arguments import natural, positive
from trainer.config.report import nearest
from trainer.errors import ConfigurationError, ExitCode, StagelineError

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

    from trainer.inference import InferenceModel

_RESAMPLES = 1000  # for standard errors that have no formula; lm-eval's 100,000 take longer than small models


def run(argv: list[str]) -> int:
    """Evaluate as the arguments say; results go to standard output, everything else to standard error.

    Returns the exit code: 2 if there is no valid checkpoint, no tokenizer, no such file or task, or no lm-eval.
    """
    arguments = _parse(argv)
    try:
        _evaluate(arguments)
    except StagelineError as error:
        _note(f"stageline evaluate: {error}")
        return error.exit_code
    return ExitCode.DONE


def _evaluate(arguments: argparse.Namespace) -> None:
    from trainer.inference import find_model

    # What can be found wrong at once is found before a model is loaded.
    text = None if arguments.file is None else _read(arguments.file)
    tasks = None if arguments.tasks is None else _Tasks(arguments)
    found = find_model(arguments.checkpoint)
    for problem in found.passed_over:
        _note(f"passed over: {problem}")
    _note(found.description)
    loaded = found.load(arguments.dtype)
    window = arguments.window or loaded.longest
    results: dict[str, Any] = {}
    if text is not None:
        results["file"] = _text(arguments, loaded, text, window)
    if tasks is not None:
        results["tasks"] = tasks.results(loaded, window)
    if arguments.json:
        print(json.dumps(results))


def _parse(argv: list[str]) -> argparse.Namespace:
    from trainer.inference import DTYPES

    parser = argparse.ArgumentParser(
        "stageline evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="the model")
    parser.add_argument("--file", type=Path, metavar="F", help="a text in UTF-8")
    parser.add_argument(
        "--window", type=positive, help="tokens that a token is given at most; default: as trained"
    )
    parser.add_argument("--stride", type=positive, help="tokens from window to window; default: the window")
    parser.add_argument(
        "--tasks", type=_names, metavar="A,B", help="tasks of lm-eval; names may have * in them"
    )
    parser.add_argument("--task-path", type=Path, metavar="FOLDER", help="where lm-eval looks for more tasks")
    parser.add_argument("--few-shot", type=natural, metavar="N", help="examples before each question")
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N questions of each task")
    parser.add_argument("--batch-size", type=positive, help="sequences at a time; default: as memory allows")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of the parameters; default auto")
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object instead")
    arguments = parser.parse_args(argv)
    if arguments.file is None and arguments.tasks is None:
        parser.error("nothing to evaluate: give --file, --tasks, or both")
    if arguments.stride is not None and arguments.file is None:
        parser.error("--stride is about --file, which is not given")
    return arguments


# Perplexity


def _read(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--file {file}: cannot be read: {error}") from error
    if not text:
        raise ConfigurationError(f"--file {file}: is empty")
    return text


def _text(arguments: argparse.Namespace, loaded: InferenceModel, text: str, window: int) -> dict[str, Any]:
    from trainer.perplexity import loss_of_text

    stride = arguments.stride or window
    if stride > window:
        raise ConfigurationError(
            f"--stride {stride}: beyond the window, of {window} tokens; allowed: 1 to {window}"
        )
    started = time.perf_counter()
    found = loss_of_text(loaded, text, window, stride, arguments.batch_size, _Counter("windows"))
    seconds = time.perf_counter() - started
    _note(f"{found.tokens:,} tokens in {seconds:.1f} s ({found.tokens / seconds:,.0f} tokens/s)")
    results = {
        "tokens": found.tokens,
        "bytes": found.bytes,
        "window": window,
        "stride": stride,
        "loss": found.loss,
        "bits_per_byte": found.bits_per_byte,
        "perplexity": found.perplexity,
    }
    if not arguments.json:
        print(f"file           {arguments.file}: {found.bytes:,} bytes, {found.tokens:,} tokens")
        print(f"windows        of {window:,} tokens, {stride:,} from one to the next")
        print(f"loss           {found.loss:.4f} nats per token")
        print(f"bits per byte  {found.bits_per_byte:.4f}")
        print(f"perplexity     {found.perplexity:.4g}")
    return results


class _Counter:
    """Shows on a terminal how many are done."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._done = 0

    def __call__(self, done: int, of: int) -> None:
        self._done += done
        if sys.stderr.isatty():
            end = "\n" if self._done == of else ""
            print(f"\r{self._done:,} of {of:,} {self._what}", end=end, file=sys.stderr, flush=True)


# Tasks


class _Tasks:
    """Tasks of lm-eval, known to be there."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """Raises ConfigurationError if lm-eval is not installed, or has no such task."""
        if importlib.util.find_spec("lm_eval") is None:
            raise ConfigurationError("--tasks needs the package lm-eval: pip install 'stageline[eval]'")
        if arguments.task_path is not None and not arguments.task_path.is_dir():
            raise ConfigurationError(f"--task-path {arguments.task_path}: no such folder")
        self._arguments = arguments
        self._manager = _task_manager(arguments)
        self._names = []
        for name in arguments.tasks:
            matching = self._manager.match_tasks([name])
            if not matching:
                near = nearest(name, self._manager.all_tasks)
                raise ConfigurationError(
                    f"--tasks {name}: lm-eval has no such task" + (f"; did you mean {near}?" if near else "")
                )
            self._names += matching

    def results(self, loaded: InferenceModel, window: int) -> dict[str, Any]:
        """Ask the model; the figures by task. Raises StagelineError if a task's data cannot be had."""
        from lm_eval import simple_evaluate
        from lm_eval.utils import make_table

        from trainer.lm_eval_model import StagelineLM

        arguments = self._arguments
        try:
            found = simple_evaluate(
                StagelineLM(loaded, window, arguments.batch_size),
                tasks=self._names,
                num_fewshot=arguments.few_shot,
                limit=arguments.limit,
                task_manager=self._manager,
                log_samples=False,
                bootstrap_iters=_RESAMPLES,
            )
        except (OSError, ConnectionError) as error:
            reason = str(error).strip().splitlines()[0]
            raise StagelineError(
                f"the data of --tasks {','.join(self._names)} cannot be had: {reason}"
            ) from error
        if not arguments.json:
            print(make_table(found))
            if "groups" in found:
                print(make_table(found, "groups"))
        figures: dict[str, Any] = found["results"]
        return figures


def _task_manager(arguments: argparse.Namespace) -> TaskManager:
    """Of the tasks in --task-path if they are all there: to go through the thousands of lm-eval takes seconds."""
    from lm_eval.tasks import TaskManager

    if arguments.task_path is not None:
        own = TaskManager(include_path=str(arguments.task_path), include_defaults=False)
        if all(own.match_tasks([name]) for name in arguments.tasks):
            return own
    return TaskManager(include_path=None if arguments.task_path is None else str(arguments.task_path))


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"expected names with commas between them, got {text!r}")
    return names
