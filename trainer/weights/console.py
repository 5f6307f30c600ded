"""Conversions as commands: the live line (how much is written, how fast, how long still), what is said, exit codes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.errors import ExitCode, StagelineError
from trainer.weights.checkpoint_writer import Progress
from trainer.weights.importing import Import, write_run_folder


@contextmanager
def progress_bar(title: str, size: int) -> Iterator[Progress]:
    """A bar on standard error for `size` bytes, if that is a terminal; yields what is to be told of the bytes."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (
        *(TextColumn("{task.description}"), BarColumn(), DownloadColumn()),
        *(TransferSpeedColumn(), TimeRemainingColumn()),
    )
    with Bar(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(title, total=size)

        def advance(count: int) -> None:
            bar.advance(task, count)

        yield advance


def run_import(command: str, open_imported: Callable[[], Import], out: Path) -> int:
    """Open what is to be imported and write it as a run folder at `out`; returns the exit code of `command`."""
    try:
        imported = open_imported()
        with progress_bar("importing", imported.size) as progress:
            write_run_folder(imported, out, progress, note)
    except StagelineError as error:
        note(f"{command}: {error}")
        return error.exit_code
    named = imported.named
    print(f"{out}: {named.name} {named.flavor}, {named.sizes.parameter_count() / 1e9:.3g} billion parameters")
    if named.override:
        changes = ", ".join(f"{key} = {value}" for key, value in named.override.items())
        print(f"with model.override: {changes}")
    if not imported.tokenizer_files:
        print(f"no tokenizer was beside it; set model.tokenizer_path in {out / 'config.toml'}")
    return ExitCode.DONE


def note(text: str) -> None:
    """A line on standard error."""
    print(text, file=sys.stderr, flush=True)
