"""A corpus in units of work: what one process of `stageline prepare` reads and tokenizes at a time.

Units are cut from the files alone (about a megabyte of text, lines, a row group or record batch), in one order,
whatever the number of processes. Each is read by itself, tells what it found bad and goes on after it.

Documents are those that training would read from the same source, in the same order and number: a bad one is an empty
document. Only rows that cannot be told apart (an unreadable row group, the rest of a broken file) give none.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

from trainer.data.files import FilePart

if TYPE_CHECKING:
    import pyarrow as pa

LONGEST_LINE = 256 << 20
"""Bytes. A longer line of JSON is no document but a damaged file."""

_TOO_LONG = b"\0"  # in place of such a line
_TEXT_TYPES = ("string", "large_string", "string_view")


class Fault(StrEnum):
    """What can be wrong with a document."""

    EMPTY = "empty"
    UTF8 = "broken UTF-8"
    LINE = "broken line"
    COLUMN = "no text"
    UNREADABLE = "unreadable"


REPAIRED = frozenset({Fault.UTF8})
"""These are kept: U+FFFD stands for the bytes that are broken."""


@dataclass(frozen=True)
class Bad:
    """A document that is empty, left out or repaired, and where it lies."""

    fault: Fault
    file: str
    position: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}, {self.position}: {self.fault}{f' ({self.reason})' if self.reason else ''}"


@dataclass(frozen=True)
class Document:
    """A text, empty where there is none, and what is wrong with it; `counts` is false where no document is there."""

    text: str
    bad: Bad | None = None
    counts: bool = True


class Unit(ABC):
    """Some documents of a corpus; small to hand to another process."""

    size: int
    """About how many bytes of the corpus these are: for the progress."""

    @abstractmethod
    def documents(self) -> Iterator[Document]:
        """The documents, each with what is wrong with it; raises nothing for bad data."""


@dataclass(frozen=True)
class Parts(Unit):
    """Files of text, or parts of them."""

    parts: tuple[FilePart, ...]
    size: int

    def documents(self) -> Iterator[Document]:
        for part in self.parts:
            file = str(part.file.path)
            try:
                begin, content = part.read()
            except OSError as error:
                yield Document("", Bad(Fault.UNREADABLE, file, "byte 0", str(error.strerror)))
                continue
            try:
                text = content.decode(part.encoding)
            except UnicodeDecodeError as error:
                bad = Bad(Fault.UTF8, file, f"byte {begin + error.start}", error.reason)
                yield Document(content.decode(part.encoding, errors="replace"), bad)
                continue
            # A later part is empty where one long line lies across it, which is no fault.
            empty = not text and part.number == 0
            yield Document(text, Bad(Fault.EMPTY, file, "byte 0", "") if empty else None)


@dataclass(frozen=True)
class Lines(Unit):
    """The lines of JSON that begin in [begin, end) of a file."""

    path: Path
    begin: int
    end: int
    column: str

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.end - self.begin

    def documents(self) -> Iterator[Document]:
        try:
            with self.path.open("rb") as stream:
                at = self.begin
                if at:
                    # The line that began before is the unit's before this one, unless it ends just here.
                    stream.seek(at - 1)
                    rest = stream.readline(self.size + 1)
                    if not rest.endswith(b"\n"):
                        return
                    at += len(rest) - 1
                while at < self.end and (line := read_line(stream)):
                    yield from _of_line(line, self.column, str(self.path), f"byte {at}")
                    at = stream.tell()
        except OSError as error:
            position = f"bytes {self.begin} to {self.end}"
            yield Document("", Bad(Fault.UNREADABLE, str(self.path), position, str(error)), counts=False)


@dataclass(frozen=True)
class ReadLines(Unit):
    """Lines of JSON that had to be read already, since their file is compressed. `broken` says why it ends here."""

    path: Path
    first: int
    lines: tuple[bytes, ...]
    column: str
    broken: str | None = None

    @property
    def size(self) -> int:  # type: ignore[override]
        return 0

    def documents(self) -> Iterator[Document]:
        for number, line in enumerate(self.lines, start=self.first):
            yield from _of_line(line, self.column, str(self.path), f"line {number}")
        if self.broken is not None:
            position = f"line {self.first + len(self.lines)}"
            yield Document("", Bad(Fault.UNREADABLE, str(self.path), position, self.broken), counts=False)


@dataclass(frozen=True)
class Texts(Unit):
    """Texts of a stream, which one process has to read."""

    source: str
    first: int
    texts: tuple[str, ...]

    @property
    def size(self) -> int:  # type: ignore[override]
        return 0

    def documents(self) -> Iterator[Document]:
        for number, text in enumerate(self.texts, start=self.first):
            yield Document(text, None if text else Bad(Fault.EMPTY, self.source, f"document {number}", ""))


@dataclass(frozen=True)
class Rows(Unit):
    """A row group of a Parquet file, or a record batch of an Arrow file."""

    path: Path
    kind: Literal["row group", "record batch"]
    number: int
    column: str
    size: int

    def documents(self) -> Iterator[Document]:
        from pyarrow import ArrowException

        row = 0
        try:
            for batch in self._batches():
                if isinstance(batch, str):
                    yield Document("", self._bad(Fault.COLUMN, row, batch), counts=False)
                    return
                for cell in batch:
                    yield self._document(cell.as_py(), row)
                    row += 1
        # A damaged file makes the readers raise all of these.
        except (ArrowException, OSError, ValueError, MemoryError, OverflowError) as error:
            bad = Bad(Fault.UNREADABLE, str(self.path), f"{self.kind} {self.number}", _in_one_line(error))
            yield Document("", bad, counts=False)

    def _batches(self) -> Iterator[pa.Array | str]:
        """The column as bytes, some rows at a time; or why there is none."""
        import pyarrow as pa

        found = self._parquet() if self.kind == "row group" else self._arrow()
        for batch in found:
            names = batch.schema.names
            if self.column not in names:
                yield f'no column "{self.column}"; it has {", ".join(names)}'
                return
            column = batch.column(names.index(self.column))
            if str(column.type) not in _TEXT_TYPES:
                yield f'the column "{self.column}" holds {column.type}, not text'
                return
            yield column.cast(pa.large_binary())

    def _parquet(self) -> Iterator[pa.RecordBatch]:
        from pyarrow.parquet import ParquetFile

        with ParquetFile(self.path, page_checksum_verification=True) as file:
            columns = [self.column] if self.column in file.schema_arrow.names else None
            yield from file.iter_batches(1024, row_groups=[self.number], columns=columns, use_threads=False)

    def _arrow(self) -> Iterator[pa.RecordBatch]:
        with record_batches(self.path) as batches:
            yield next(islice(batches, self.number, None))

    def _document(self, content: bytes | None, row: int) -> Document:
        if not content:
            return Document("", self._bad(Fault.EMPTY, row, ""))
        try:
            return Document(content.decode())
        except UnicodeDecodeError as error:
            repaired = content.decode(errors="replace")
            return Document(repaired, self._bad(Fault.UTF8, row, f"byte {error.start}: {error.reason}"))

    def _bad(self, fault: Fault, row: int, reason: str) -> Bad:
        return Bad(fault, str(self.path), f"{self.kind} {self.number}, row {row}", reason)


@dataclass(frozen=True)
class Broken(Unit):
    """A file that could not be opened, or only to some point."""

    path: Path
    reason: str
    size: int = 0

    def documents(self) -> Iterator[Document]:
        yield Document("", Bad(Fault.UNREADABLE, str(self.path), "the file", self.reason), counts=False)


@contextmanager
def record_batches(path: Path) -> Iterator[Iterator[pa.RecordBatch]]:
    """The record batches of an Arrow file or stream, memory-mapped: to skip one costs next to nothing."""
    import pyarrow as pa

    with pa.memory_map(str(path)) as mapped:
        try:
            file = pa.ipc.open_file(mapped)
        except pa.ArrowInvalid:
            mapped.seek(0)
            yield iter(pa.ipc.open_stream(mapped))
        else:
            yield (file.get_batch(number) for number in range(file.num_record_batches))


def read_line(stream: BinaryIO) -> bytes:
    """The next line, of bounded length: a mark in place of a longer one; nothing at the end."""
    line = stream.readline(LONGEST_LINE)
    if len(line) < LONGEST_LINE or line.endswith(b"\n"):
        return line
    while (more := stream.readline(LONGEST_LINE)) and not more.endswith(b"\n"):
        pass
    return _TOO_LONG


def _of_line(line: bytes, column: str, file: str, position: str) -> Iterator[Document]:
    """The document of a line of JSON; none of a blank line."""
    if line == _TOO_LONG:
        yield Document("", Bad(Fault.LINE, file, position, f"longer than {LONGEST_LINE >> 20} MiB"))
        return
    if not line.strip():
        return
    bad = None
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        text = line.decode(errors="replace")
        bad = Bad(Fault.UTF8, file, position, f"byte {error.start} of the line: {error.reason}")
    try:
        row = json.loads(text.removeprefix("\ufeff"))
    except (ValueError, RecursionError) as error:
        yield Document("", Bad(Fault.LINE, file, position, _in_one_line(error)))
        return
    yield _of_row(row, column, file, position, bad)


def _of_row(row: object, column: str, file: str, position: str, bad: Bad | None) -> Document:
    if not isinstance(row, dict):
        return Document("", Bad(Fault.LINE, file, position, "no JSON object"))
    if column not in row:
        return Document("", Bad(Fault.COLUMN, file, position, f'no "{column}"; it has {", ".join(row)}'))
    text = row[column]
    if text is None or text == "":
        return Document("", Bad(Fault.EMPTY, file, position, ""))
    if not isinstance(text, str):
        reason = f'"{column}" holds {type(text).__name__}, not text'
        return Document("", Bad(Fault.COLUMN, file, position, reason))
    try:
        text.encode()
    except UnicodeEncodeError as error:
        whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return Document(whole, Bad(Fault.UTF8, file, position, f"half a surrogate pair: {error.reason}"))
    return Document(text, bad)


def _in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
