"""What a person sees: a live line on a terminal, plain lines elsewhere, and each rank's own log file."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress


def set_up_logging(folder: Path, rank: int) -> None:
    """All lines go to logs/rank_N.log; those of the ranks in LOG_RANK (default 0) also to standard error."""
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    line = logging.Formatter(f"%(asctime)s rank {rank} %(levelname)s %(message)s")
    file = logging.FileHandler(logs / f"rank_{rank}.log", encoding="utf-8")
    file.setFormatter(line)
    handlers: list[logging.Handler] = [file]
    if str(rank) in os.environ.get("LOG_RANK", "0").split(","):
        shown = logging.StreamHandler(sys.stderr)
        shown.setFormatter(line)
        shown.setLevel(logging.WARNING if rank == 0 else logging.INFO)
        handlers.append(shown)
    root.handlers = handlers
    logging.getLogger("trainer").setLevel(logging.DEBUG)
    for noisy in ("httpx", "filelock", "fsspec", "urllib3", "datasets"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


class Console:
    """Standard output of the rank that speaks; the others have a silent one."""

    def __init__(self, *, silent: bool, plain: bool) -> None:
        self._silent = silent
        self._progress: RichProgress | None = None
        self._live = not silent and not plain and sys.stdout.isatty()

    def say(self, line: str) -> None:
        """One line of text."""
        if self._silent:
            return
        if self._progress is not None:
            self._progress.console.print(line, markup=False, highlight=False)
        else:
            print(line, flush=True)

    def say_all(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Lines of subject and text."""
        for subject, text in pairs:
            self.say(f"{subject:12}{text}")

    def start_progress(self, step: int, steps: int) -> None:
        """Show a live line from now on, if this is a terminal."""
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
        self._progress.start()
        self._progress.add_task("", total=steps, completed=step)

    def advance(self, step: int, description: str) -> None:
        """Move the live line to a step."""
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=step, description=description)

    def stop_progress(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    @property
    def live(self) -> bool:
        """Whether a live line is shown, so that steps need no line of their own."""
        return self._progress is not None
