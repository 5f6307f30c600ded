"""Show where runs stand: step, loss, speed, time left, last checkpoint, last error.

    stageline status outputs/*
    stageline status outputs/debug --errors
    stageline status outputs/study --json

A folder of runs, such as a study's, stands for them. --errors shows what all ranks logged as errors, merged by time.
Exit code 0, or 4 if a run failed, was killed or is stale.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from trainer.errors import ExitCode
from trainer.status import Standing, Status, read_errors, read_status, run_folders

_COLOURS = {
    Standing.RUNNING: "cyan",
    Standing.FINISHED: "green",
    Standing.FAILED: "red",
    Standing.KILLED: "red",
    Standing.STALE: "red",
    Standing.STOPPED: "yellow",
}
_BAD = (Standing.FAILED, Standing.KILLED, Standing.STALE)


def run(argv: list[str]) -> int:
    """Carry out `stageline status`. Raises ConfigurationError if a folder is none of a run."""
    arguments = _parser().parse_args(argv)
    folders = [folder for given in arguments.run_folders for folder in run_folders(given)]
    if arguments.errors:
        return _show_errors(folders)
    found = [read_status(folder) for folder in folders]
    if arguments.json:
        print(json.dumps([{**asdict(status), "folder": str(status.folder)} for status in found], indent=1))
    else:
        show(found)
    return ExitCode.RANK_FAILED if any(status.standing in _BAD for status in found) else ExitCode.DONE


def show(found: Sequence[Status]) -> None:
    """A table of the runs, and what went wrong below it."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = ("run", "state", "step", "loss", "validation", "tokens/s", "left", "checkpoint", "last sign")
    for name in columns:
        table.add_column(name, justify="left" if name in ("run", "state") else "right", overflow="fold")
    for status in found:
        state = Text(status.standing, style=_COLOURS.get(status.standing, ""))
        table.add_row(Text(str(status.folder)), state, *(Text(cell) for cell in _cells(status)))
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    console.print(table)
    for status in found:
        if status.error is not None:
            console.print(
                f"{status.folder}: exit code {status.exit_code}: {status.error}", markup=False, soft_wrap=True
            )


def _cells(status: Status) -> Iterator[str]:
    steps = "" if status.steps is None else f"/{status.steps}"
    yield "-" if status.step is None else f"{status.step}{steps}"
    yield "-" if status.loss is None else f"{status.loss:.4f}"
    yield "-" if status.validation_loss is None else f"{status.validation_loss:.4f}"
    yield "-" if status.tokens_per_second is None else f"{status.tokens_per_second:,.0f}"
    yield _time(status.seconds_left)
    yield "-" if status.checkpoint is None else f"step {status.checkpoint}"
    yield "-" if status.quiet is None else f"{_time(status.quiet)} ago"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, hours = round(seconds / 60), seconds / 3600
    if minutes < 60:
        return f"{minutes} min"
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} days"


def _show_errors(folders: Sequence[Path]) -> int:
    for folder in folders:
        errors = read_errors(folder)
        print(
            f"{folder}: {len(errors) or 'no'} {'error' if len(errors) == 1 else 'errors'} in the logs of its ranks"
        )
        for error in errors:
            print(f"{error.when} rank {error.rank} {error.text}")
        if (reason := read_status(folder).error) is not None:
            print(f"{folder}: ended by: {reason}")
    return ExitCode.DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stageline status", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "run_folders", nargs="+", type=Path, metavar="RUN_FOLDER", help="of a run, or of several"
    )
    parser.add_argument(
        "--errors", action="store_true", help="the errors that all ranks logged, merged by time"
    )
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    return parser
