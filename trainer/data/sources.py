"""Where documents come from: one interface for files, tables and hub data sets, opened by name.

| dataset                | documents                                                                        |
|------------------------|----------------------------------------------------------------------------------|
| "python_docs"          | the standard library of the running Python: a file each, nothing to download     |
| "text"                 | the .txt files of `dataset_path`: a file each                                     |
| "jsonl", "parquet", "arrow" | the rows of the files of `dataset_path`, text in `text_column`               |
| "owner/name"           | a data set of the Hugging Face hub, streamed; "owner/name:config@split" to be exact |
| any other, with `dataset_path` | the same, from a local folder in a layout that the datasets library knows |

This module loads no library; each kind of source loads its own when it is opened.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Iterator

from trainer.errors import ConfigurationError

PYTHON_DOCS = "python_docs"
TEXT = "text"
TABLES = ("jsonl", "parquet", "arrow")
LOCAL = (PYTHON_DOCS, TEXT, *TABLES)
"""The names that are not hub data sets."""


class IndexedSource(ABC):
    """Documents by index, in any order: these can be shuffled."""

    name: str
    """For messages: what was opened, with its path."""
    fingerprint: str
    """Changes when the documents, or their order, may have changed."""

    @abstractmethod
    def __len__(self) -> int:
        """How many documents there are; at least one."""

    @abstractmethod
    def read(self, index: int) -> str:
        """Document `index`, which may be empty. Raises SourceFailed if it is no longer there."""


class StreamingSource(ABC):
    """Documents one after the other, from any position."""

    name: str
    """For messages: what was opened, with its path."""
    fingerprint: str
    """Changes when other documents, or another order, were asked for."""

    @abstractmethod
    def documents(self, start: int) -> Iterator[str]:
        """One epoch from document `start` on. Raises SourceFailed if the source stays away."""


Source = IndexedSource | StreamingSource


def open_source(dataset: str, dataset_path: str | None = None, text_column: str = "text") -> Source:
    """Open the data named by the keys of `[training]` or `[validation]` (the table at the top says how).

    Raises ConfigurationError for a path that is missing or holds no such file, a table without `text_column`, an
    unknown name, and a hub that is not reached after a bounded number of attempts.
    """
    if dataset == PYTHON_DOCS:
        from trainer.data.files import python_docs

        return python_docs()
    if dataset in LOCAL:
        if not dataset_path:
            raise ConfigurationError(
                f'dataset "{dataset}" needs a dataset_path: a file, a folder or a pattern'
            )
        if dataset == TEXT:
            from trainer.data.files import text_files

            return text_files(dataset_path)
        from trainer.data.tables import open_table

        return open_table(dataset, dataset_path, text_column)
    near = difflib.get_close_matches(dataset, LOCAL, n=1, cutoff=0.75)
    if near and "/" not in dataset and not dataset_path:
        raise ConfigurationError(f'dataset "{dataset}" is unknown; did you mean "{near[0]}"?')
    from trainer.data.hub import open_hub

    return open_hub(dataset, dataset_path, text_column)
