"""`stageline prepare --tokenizer`: makes a token store and says how far it is."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from trainer.data.corpora import open_corpus
from trainer.data.corpus import Bad, Fault
from trainer.data.preparation import BadDocument, OnError, Preparation, Prepared, Sofar, prepare
from trainer.data.store_format import BAD_DOCUMENTS
from trainer.errors import ExitCode

_MOST_NAMED = 10
_WORTH_COUNTING = 1 << 28  # bytes; to find the number of a line all before it is read
_SECONDS_BETWEEN_LINES = 10.0


def prepare_store(arguments: argparse.Namespace) -> int:
    """Make the store that the arguments describe; the exit code."""
    corpus = open_corpus(arguments.dataset, arguments.dataset_path, arguments.text_column)
    output = Path(arguments.output)
    wanted = Preparation(
        corpus,
        arguments.tokenizer,
        output,
        arguments.workers,
        arguments.text_column,
        add_bos=not arguments.no_bos,
        add_eos=not arguments.no_eos,
        shard_tokens=arguments.shard_tokens,
        on_error=OnError(arguments.on_error),
    )
    print(f"tokenizing {corpus.name} with {arguments.workers} process(es) into {output}", flush=True)
    display = _Display(corpus.size, output)
    try:
        with _terminated_like_interrupted(), display:
            prepared = prepare(wanted, display.show)
    except BadDocument as error:
        raise BadDocument(_with_line(error.bad)) from error
    except KeyboardInterrupt:
        print("stageline prepare: stopped on request; the same command goes on from here", file=sys.stderr)
        return ExitCode.STOPPED_ON_REQUEST
    _conclude(prepared, output)
    return ExitCode.DONE


def _conclude(prepared: Prepared, output: Path) -> None:
    made = prepared.metadata
    if prepared.seconds == 0:
        print(f"{output} is there already: ", end="")
    elif prepared.resumed_at:
        print(f"went on after {prepared.resumed_at:,} documents: ", end="")
    else:
        print(f"wrote {output}: ", end="")
    print(
        f"{made.documents:,} documents, {made.tokens:,} tokens as {made.dtype}, {len(made.shards)} shard(s)"
    )
    if prepared.seconds:
        print(f"{prepared.tokens / prepared.seconds:,.0f} tokens/s in {prepared.seconds:.1f} s")
    if made.bad_documents:
        counts = ", ".join(f"{count:,} {fault}" for fault, count in made.bad_documents.items())
        print(f"bad documents: {counts}; listed in {output / BAD_DOCUMENTS}")
    print(f"use it with --training.dataset store --training.dataset_path {output}")


class _Display:
    """A line that moves on a terminal, a line now and then elsewhere; the first bad documents by name."""

    def __init__(self, size: int | None, output: Path) -> None:
        console = Console(file=sys.stderr)
        self._moving = console.is_terminal
        columns = (
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[said]}"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console, disable=not self._moving, transient=True)
        self._task = self._progress.add_task("", total=size, said="")
        self._output = output
        self._named = 0
        self._began = self._last = time.monotonic()
        self._first_tokens: int | None = None

    def __enter__(self) -> _Display:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, sofar: Sofar) -> None:
        """After each unit."""
        now = time.monotonic()
        if self._first_tokens is None:
            # What an earlier run did is not this one's speed.
            self._first_tokens, self._began = sofar.tokens, now
        speed = (sofar.tokens - self._first_tokens) / max(now - self._began, 1e-9)
        said = f"{sofar.documents:,} documents, {sofar.tokens:,} tokens, {speed:,.0f} tokens/s"
        self._progress.update(self._task, advance=sofar.size, said=said)
        for bad in sofar.bad[: max(0, _MOST_NAMED - self._named)]:
            self._progress.console.print(
                f"bad document: {bad}", style="yellow", markup=False, highlight=False
            )
        self._named += len(sofar.bad)
        if not self._moving and now - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = now
            print(said, file=sys.stderr, flush=True)


def _with_line(bad: Bad) -> Bad:
    """The same, with the number of the line where a file that is not very large has lines."""
    if bad.fault is Fault.EMPTY or not bad.position.startswith("byte "):
        return bad
    begin = int(bad.position.removeprefix("byte "))
    if begin > _WORTH_COUNTING:
        return bad
    try:
        with open(bad.file, "rb") as stream:
            before = stream.read(begin)
    except OSError:
        return bad
    line = before.count(b"\n") + 1
    return replace(bad, position=f"line {line} ({bad.position})")


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM inside is a KeyboardInterrupt too."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
