"""What a person sees: a live line on a terminal, plain lines elsewhere, and each rank's own log file.

What is said to the person goes to standard output; what is logged (checkpoints, warnings, errors) to standard
error with time and rank. Both are in logs/rank_N.log.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.errors import ConfigurationError
from trainer.secrets import redact

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

# What is said to the person is shown already: it goes through this logger to the file alone.
_said = logging.getLogger("stageline.said")
_OWN_LOGGERS = ("__main__", "trainer", "models", "parallelisms", _said.name)


def shown_ranks() -> frozenset[int]:
    """The ranks whose log is shown: LOG_RANK, by default 0. Raises ConfigurationError if it is no list of ranks."""
    text = os.environ.get("LOG_RANK", "0")
    ranks = [part.strip() for part in text.split(",")]
    if not all(rank.isdecimal() for rank in ranks):
        raise ConfigurationError(
            f"environment: LOG_RANK = {text!r}: expected ranks separated by commas, like 0,1"
        )
    return frozenset(map(int, ranks))


def set_up_logging(folder: Path, rank: int) -> None:
    """All lines go to logs/rank_N.log in the run folder; those of the ranks in LOG_RANK to standard error too.

    Of other libraries only warnings are logged. Raises ConfigurationError as `shown_ranks` does.
    """
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    line = _WithoutSecrets(f"%(asctime)s rank {rank} %(levelname)s %(message)s")
    handlers: list[logging.Handler] = [logging.FileHandler(logs / f"rank_{rank}.log", encoding="utf-8")]
    if rank in shown_ranks():
        handlers.append(_StandardError())
    for handler in handlers:
        handler.setFormatter(line)
    root = logging.getLogger()
    for former in root.handlers:
        former.close()
    root.handlers = handlers
    root.setLevel(logging.WARNING)
    for name in _OWN_LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO)
    logging.captureWarnings(True)


class Console:
    """Standard output of the rank that speaks; the others have a silent one."""

    def __init__(self, *, silent: bool, plain: bool) -> None:
        """`plain`: no colors and no live line, also on a terminal."""
        self._silent = silent
        self._progress: RichProgress | None = None
        self._live = not silent and not plain and sys.stdout.isatty()

    def say(self, line: str) -> None:
        """One line of text."""
        if self._silent:
            return
        line = redact(line)
        _said.info(line)
        if self._progress is not None:
            self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, flush=True)

    def say_all(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Lines of subject and text, the texts below each other."""
        for subject, text in pairs:
            self.say(f"{subject:12}{text}")

    def start_progress(self, step: int, steps: int) -> None:
        """Show a live line from now on, if this is a terminal. `step`: made before, of `steps`."""
        if not self._live:
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.description}"),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._progress.add_task("", total=steps, completed=step)
        self._progress.start()
        # A process that is killed cannot show the cursor again: it is not hidden in the first place.
        self._progress.console.show_cursor(True)

    def advance(self, step: int, description: str) -> None:
        """Move the live line to a step."""
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=step, description=description)

    def stop_progress(self) -> None:
        """Leave the live line as it is; lines are plain from now on."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    @property
    def live(self) -> bool:
        """Whether a live line is shown, so that steps need no line of their own."""
        return self._progress is not None


class _WithoutSecrets(logging.Formatter):
    """Of messages, and of the tracebacks with them."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


class _StandardError(logging.Handler):
    """Writes to what sys.stderr is at the time: the live line replaces it to print above itself."""

    def __init__(self) -> None:
        super().__init__()
        self.addFilter(lambda record: record.name != _said.name)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)
