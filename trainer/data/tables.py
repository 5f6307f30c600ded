"""Documents that are rows of local JSON-lines, Parquet or Arrow files, through the datasets library.

The library turns the files into its memory-mapped Arrow cache once (one process of a machine does so, the others
wait for it); after that any row is read by its number, so these sources can be shuffled and resume at once. Of files
that it cannot read, since they are damaged, the cache holds what `stageline prepare` would read of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainer.data.errors import SourceFailed
from trainer.data.files import fingerprint, matching_files
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
_TEXT, _FLAW = "text", "flaw"  # columns of a cache of damaged files


class TableSource(IndexedSource):
    """The rows of a table, in order; a row without text is an empty document, which is bad."""

    def __init__(
        self, name: str, rows: Any, text_column: str, source_fingerprint: str, *, damaged: bool = False
    ) -> None:
        """`rows` is a datasets.Dataset; if its files are `damaged`, what is wrong is in a column of its own.

        Raises ConfigurationError if it has no such column of text.
        """
        check_text_column(name, rows.features, text_column)
        if len(rows) == 0:
            raise ConfigurationError(f"{name}: the files hold no row")
        self.name = name
        self.fingerprint = source_fingerprint
        self._rows = rows.select_columns([text_column, _FLAW] if damaged else [text_column])
        self._column = text_column
        self._damaged = damaged

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> str:
        try:
            try:
                row = self._rows[index]
                text: str | None = row[self._column]
                if self._damaged and row[_FLAW]:
                    return FlawedText(text or "", row[_FLAW])
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

    Raises ConfigurationError, with file and cause, for a missing file, a missing column, or if nothing can be read.
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
        rows = _readable_rows(kind, dataset_path, text_column)
        texts = (row for row in rows if row[_TEXT])
        if next(texts, None) is None:
            where = rows[0][_FLAW] if len(rows) else root_cause(error)
            raise ConfigurationError(f"{name} cannot be read: {where}") from error
        return TableSource(name, rows, _TEXT, fingerprint(files), damaged=True)
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


def _readable_rows(kind: str, dataset_path: str, text_column: str) -> Any:
    """A datasets.Dataset of what can be read of damaged files, each row with what is wrong with it. Raises
    ConfigurationError if there is no such column."""
    from datasets import Dataset, Features, Value

    from trainer.data.corpora import open_corpus  # which knows the files by this module

    corpus = open_corpus(kind, dataset_path, text_column)
    corpus.check()
    what = {"kind": kind, "path": dataset_path, "column": text_column, "version": corpus.fingerprint}
    columns = Features({_TEXT: Value("large_string"), _FLAW: Value("string")})
    with quiet_datasets():
        return Dataset.from_generator(_readable, gen_kwargs=what, features=columns)


def _readable(kind: str, path: str, column: str, version: str) -> Iterator[dict[str, str]]:
    """`version` is in the name of the cache: other files are other rows."""
    from trainer.data.corpora import open_corpus

    for unit in open_corpus(kind, path, column).units(0, 0):
        for document in unit.documents():
            yield {_TEXT: document.text, _FLAW: str(document.bad or "")}
