"""The live line of a conversion: how many bytes are written, how fast, how long it will still take."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.weights.checkpoint_writer import Progress


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
