"""Corpora by name, cut into units: the same data sets, in the same order, that training reads as text."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from trainer.data.corpus import (
    Broken,
    Fault,
    Lines,
    Parts,
    ReadLines,
    Rows,
    Texts,
    Unit,
    read_line,
    record_batches,
)
from trainer.data.files import (
    FilePart,
    FileSource,
    FoundFile,
    fingerprint,
    matching_files,
    python_docs,
    text_files,
)
from trainer.data.sources import PYTHON_DOCS, TABLES, TEXT, TOKENIZED, StreamingSource, open_source
from trainer.data.tables import SUFFIXES
from trainer.errors import ConfigurationError

UNIT_BYTES = 1 << 20
_MOST_DOCUMENTS = 4096  # of a unit: bounds what small or empty files cost to hand over
_COMPRESSED = {".gz": "gzip", ".zst": "zstd"}


class Corpus(ABC):
    """Documents in units, of one source."""

    name: str
    """For messages: what was opened, with its path."""
    fingerprint: str
    """Changes when the documents, or their order, may have changed."""
    size: int | None
    """Bytes of its files; None if unknown."""

    @abstractmethod
    def units(self, done: int, documents: int) -> Iterator[Unit]:
        """The units after the first `done`, which held so many documents."""

    def check(self) -> None:
        """Raise ConfigurationError if the first documents have no text where it is looked for."""
        for unit in islice(self.units(0, 0), 1):
            looked_at = list(islice(unit.documents(), 100))
            bad = [document.bad for document in looked_at if document.bad is not None]
            if len(bad) == len(looked_at) and all(one.fault is Fault.COLUMN for one in bad) and bad:
                raise ConfigurationError(f"{self.name}: {bad[0].file}, {bad[0].position}: {bad[0].reason}")


class TextCorpus(Corpus):
    """Files of text."""

    def __init__(self, source: FileSource) -> None:
        self.name, self.fingerprint = source.name, source.fingerprint
        self._parts = source.parts
        self.size = sum(part.file.size for part in source.parts if part.number == 0)

    def units(self, done: int, documents: int) -> Iterator[Unit]:
        return islice(self._units(), done, None)

    def _units(self) -> Iterator[Unit]:
        gathered: list[FilePart] = []
        size = 0
        for part in self._parts:
            gathered.append(part)
            size += max(0, min(part.size, part.file.size - part.number * part.size))
            if size >= UNIT_BYTES or len(gathered) == _MOST_DOCUMENTS:
                yield Parts(tuple(gathered), size)
                gathered, size = [], 0
        if gathered:
            yield Parts(tuple(gathered), size)


class TableCorpus(Corpus):
    """Files of JSON lines, Parquet or Arrow files, read without a copy of them being made."""

    def __init__(self, kind: str, dataset_path: str, column: str) -> None:
        self.name = f'dataset "{kind}" ({dataset_path})'
        self._kind, self._column = kind, column
        self._files: Sequence[FoundFile] = matching_files(dataset_path, SUFFIXES[kind])
        self.fingerprint = fingerprint(self._files)
        self.size = sum(file.size for file in self._files)

    def units(self, done: int, documents: int) -> Iterator[Unit]:
        return islice((unit for file in self._files for unit in self._of_file(file)), done, None)

    def _of_file(self, file: FoundFile) -> Iterator[Unit]:
        if file.size == 0:
            return iter([Broken(file.path, "the file is empty")])
        if self._kind == "parquet":
            return self._row_groups(file)
        if self._kind == "arrow":
            return self._record_batches(file)
        if file.path.suffix in _COMPRESSED:
            return self._compressed_lines(file.path)
        return (
            Lines(file.path, begin, min(begin + UNIT_BYTES, file.size), self._column)
            for begin in range(0, file.size, UNIT_BYTES)
        )

    def _row_groups(self, file: FoundFile) -> Iterator[Unit]:
        from pyarrow import ArrowException
        from pyarrow.parquet import read_metadata

        try:
            groups = read_metadata(file.path).num_row_groups
        except (ArrowException, OSError) as error:
            yield Broken(file.path, str(error), file.size)
            return
        for number in range(groups):
            yield Rows(file.path, "row group", number, self._column, file.size // groups)

    def _record_batches(self, file: FoundFile) -> Iterator[Unit]:
        from pyarrow import ArrowException

        found = 0
        try:
            with record_batches(file.path) as batches:
                for number, batch in enumerate(batches):
                    yield Rows(file.path, "record batch", number, self._column, batch.nbytes)
                    found += 1
        except (ArrowException, OSError) as error:
            yield Broken(file.path, f"after record batch {found}: {error}")

    def _compressed_lines(self, path: Path) -> Iterator[Unit]:
        import pyarrow as pa

        first, lines, held = 1, [], 0
        broken = None
        try:
            with pa.input_stream(str(path), compression=_COMPRESSED[path.suffix]) as opened:
                stream = io.BufferedReader(opened, UNIT_BYTES)
                while line := read_line(stream):
                    lines.append(line)
                    held += len(line)
                    if held >= UNIT_BYTES:
                        yield ReadLines(path, first, tuple(lines), self._column)
                        first, lines, held = first + len(lines), [], 0
        except (pa.ArrowException, OSError) as error:
            broken = str(error)
        if lines or broken is not None:
            yield ReadLines(path, first, tuple(lines), self._column, broken)


class StreamCorpus(Corpus):
    """A data set of the hub: read by one process, tokenized by all."""

    size = None

    def __init__(self, source: StreamingSource) -> None:
        self.name, self.fingerprint = source.name, source.fingerprint
        self._source = source

    def units(self, done: int, documents: int) -> Iterator[Unit]:
        first, texts, held = documents, [], 0
        for text in self._source.documents(documents):
            texts.append(text)
            held += len(text)
            if held >= UNIT_BYTES or len(texts) == _MOST_DOCUMENTS:
                yield Texts(self.name, first, tuple(texts))
                first, texts, held = first + len(texts), [], 0
        if texts:
            yield Texts(self.name, first, tuple(texts))


def open_corpus(dataset: str, dataset_path: str | None, text_column: str) -> Corpus:
    """The data named as in `[training]`. Raises ConfigurationError like `open_source`, and if the first documents
    have no `text_column`."""
    corpus: Corpus
    if dataset == PYTHON_DOCS:
        corpus = TextCorpus(python_docs())
    elif dataset in (TEXT, *TABLES) and dataset_path:
        corpus = (
            TextCorpus(text_files(dataset_path))
            if dataset == TEXT
            else TableCorpus(dataset, dataset_path, text_column)
        )
    elif dataset in TOKENIZED:
        raise ConfigurationError(f'dataset "{dataset}" holds tokens already')
    else:
        source = open_source(dataset, dataset_path, text_column)
        if not isinstance(source, StreamingSource):
            raise ConfigurationError(
                f'dataset "{dataset}" is tokenized while training; a store is made of plain text: '
                f"{', '.join((PYTHON_DOCS, TEXT, *TABLES))}, or a data set of the hub"
            )
        corpus = StreamCorpus(source)
    corpus.check()
    return corpus
