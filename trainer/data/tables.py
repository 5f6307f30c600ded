"""Documents that are rows of local JSON-lines, Parquet or Arrow files, through the datasets library.

The library turns the files into its memory-mapped Arrow cache once (one process of a machine does so, the others
wait for it); after that any row is read by its number, so these sources can be shuffled and resume at once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from trainer.data.errors import SourceFailed
from trainer.data.files import FoundFile, fingerprint, matching_files
from trainer.data.quiet import quiet_datasets
from trainer.data.sources import FlawedText, IndexedSource
from trainer.errors import ConfigurationError

SUFFIXES = {
    "jsonl": (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson"),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
}
_BUILDERS = {"jsonl": "json", "parquet": "parquet", "arrow": "arrow"}
_TEXT_TYPES = ("string", "large_string", "string_view")


class TableSource(IndexedSource):
    """The rows of a table, in order; a row without text is an empty document, which is bad."""

    def __init__(self, name: str, rows: Any, text_column: str, source_fingerprint: str) -> None:
        """`rows` is a datasets.Dataset. Raises ConfigurationError if it has no such column of text."""
        check_text_column(name, rows.features, text_column)
        if len(rows) == 0:
            raise ConfigurationError(f"{name}: the files hold no row")
        self.name = name
        self.fingerprint = source_fingerprint
        self._rows = rows.select_columns([text_column])
        self._column = text_column

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> str:
        try:
            try:
                text: str | None = self._rows[index][self._column]
            except UnicodeDecodeError:
                text = self._repaired(index)
        except (OSError, ValueError) as error:
            raise SourceFailed(f"{self.name}: row {index} cannot be read: {error}") from error
        return text or FlawedText("", f"row {index}: empty")

    def _repaired(self, index: int) -> str:
        """The text of a row whose bytes are not UTF-8, with U+FFFD for what is broken."""
        cell = self._rows.with_format("arrow")[index : index + 1][self._column].cast("binary")[0]
        content: bytes = cell.as_py()
        return FlawedText(content.decode("utf-8", errors="replace"), f"row {index}: broken UTF-8")


def open_table(kind: str, dataset_path: str, text_column: str) -> TableSource:
    """Open the files of `dataset_path` (a file, a folder or a pattern); `kind` is "jsonl", "parquet" or "arrow".

    Raises ConfigurationError, with file and cause, for a missing or broken file or a missing column.
    """
    files = matching_files(dataset_path, SUFFIXES[kind])
    name = f'dataset "{kind}" ({dataset_path})'
    from datasets import load_dataset

    try:
        with quiet_datasets():
            rows = load_dataset(
                _BUILDERS[kind], data_files=[str(file.path.resolve()) for file in files], split="train"
            )
    # The library wraps whatever its readers raise in errors of many kinds.
    except Exception as error:
        where = _first_broken_line(files) if kind == "jsonl" else None
        where = where or _first_unreadable(kind, dataset_path, text_column)
        raise ConfigurationError(f"{name} cannot be read: {where or root_cause(error)}") from error
    return TableSource(name, rows, text_column, fingerprint(files))


def check_text_column(name: str, features: Any, text_column: str) -> None:
    """Raise ConfigurationError unless the columns (datasets.Features) have `text_column`, of text."""
    if text_column not in features:
        raise ConfigurationError(
            f'{name}: no column "{text_column}" (training.text_column); it has {", ".join(map(str, features))}'
        )
    kind = getattr(features[text_column], "dtype", features[text_column])
    if kind not in _TEXT_TYPES:
        raise ConfigurationError(f'{name}: the column "{text_column}" holds {kind}, not text')


def root_cause(error: BaseException) -> str:
    """The words of the error that the datasets library's own error was raised for."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _first_broken_line(files: Sequence[FoundFile]) -> str | None:
    """Where the JSON is broken; the library names the row at most, counted within a block of the file."""
    for file in files:
        if file.path.suffix in (".gz", ".zst"):
            continue
        with file.path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    if line.strip():
                        row = json.loads(line.decode("utf-8", errors="replace"))
                        json.dumps(row, ensure_ascii=False).encode()  # half a surrogate pair is no text
                except ValueError as error:
                    return f"{file.path}, line {number}: {error}"
    return None


def _first_unreadable(kind: str, dataset_path: str, text_column: str) -> str | None:
    """The first row group, record batch, line or file that `stageline prepare` would leave out; the library names none."""
    from trainer.data.corpora import open_corpus  # which knows the files by this module
    from trainer.data.corpus import Fault

    for unit in open_corpus(kind, dataset_path, text_column).units(0, 0):
        for document in unit.documents():
            bad = document.bad
            if bad is not None and bad.fault in (Fault.LINE, Fault.UNREADABLE):
                return f"{bad.file}, {bad.position}: {bad.reason}"
    return None
