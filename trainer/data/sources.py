"""Where documents come from: one interface for files, tables and hub data sets, opened by name.

| dataset                | documents                                                                        |
|------------------------|----------------------------------------------------------------------------------|
| "python_docs"          | the standard library of the running Python: a file each, nothing to download     |
| "text"                 | the .txt files of `dataset_path`: a file each                                     |
| "jsonl", "parquet", "arrow" | the rows of the files of `dataset_path`, text in `text_column`               |
| "chat"                 | conversations, in the lines of the JSON-lines files of `dataset_path`: "messages", or "prompt" and "completion" |
| "store"                | the documents of a token store that `stageline prepare` made: the folder `dataset_path` |
| "megatron"             | those of an indexed data set of Megatron-LM: `dataset_path` with .bin and .idx    |
| "owner/name"           | a data set of the Hugging Face hub, streamed; "owner/name:config@split" to be exact |
| any other, with `dataset_path` | the same, from a local folder in a layout that the datasets library knows |

This module loads no library; each kind of source loads its own when it is opened.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from trainer.data.tokenizer import Tokenizer

PYTHON_DOCS = "python_docs"
TEXT = "text"
TABLES = ("jsonl", "parquet", "arrow")
CHAT = "chat"
STORE = "store"
MEGATRON = "megatron"
TOKENIZED = (STORE, MEGATRON)
"""Documents that are tokens already."""
LOCAL = (PYTHON_DOCS, TEXT, *TABLES, CHAT, *TOKENIZED)
"""The names that are not hub data sets."""


class FlawedText(str):
    """A document of which something is wrong: its text as far as it could be repaired, maybe empty."""

    flaw: str
    """File, position and what is wrong there."""

    def __new__(cls, text: str, flaw: str) -> FlawedText:
        flawed = super().__new__(cls, text)
        flawed.flaw = flaw
        return flawed


@dataclass(frozen=True)
class Segment:
    """Of a document: a text, or in its place one token by its id, and whether the loss is taken of it."""

    text: str
    learned: bool
    token: int | None = None


Text = str | tuple[Segment, ...]


@dataclass(frozen=True)
class Message:
    """What one side of a conversation says; the loss is taken of what the assistant does."""

    role: str
    content: str


Conversation = tuple[Message, ...]


class ChatSource(ABC):
    """Conversations by index, in any order."""

    name: str
    """For messages: what was opened, with its path."""
    fingerprint: str
    """Changes when the conversations, or their order, may have changed."""

    @abstractmethod
    def __len__(self) -> int:
        """How many there are; at least one."""

    @abstractmethod
    def read(self, index: int) -> Conversation | FlawedText:
        """Conversation `index`, or what is wrong with it. Raises SourceFailed if it is no longer there."""


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
        """Document `index`, which may be empty or a FlawedText. Raises SourceFailed if it is no longer there."""


class StreamingSource(ABC):
    """Documents one after the other, from any position."""

    name: str
    """For messages: what was opened, with its path."""
    fingerprint: str
    """Changes when other documents, or another order, were asked for."""

    @abstractmethod
    def documents(self, start: int) -> Iterator[str]:
        """One epoch from document `start` on. Raises SourceFailed if the source stays away."""


class TokenizedSource(ABC):
    """Documents of tokens by index, in any order, whose lengths are known without reading them."""

    name: str
    """For messages: what was opened, with its path."""
    fingerprint: str
    """Changes when the documents, or their order, may have changed."""
    total_tokens: int
    """Of all documents, begin and end tokens among them."""

    @abstractmethod
    def __len__(self) -> int:
        """How many documents there are; at least one."""

    @abstractmethod
    def read(self, index: int) -> npt.NDArray[np.integer]:
        """The tokens (n,) of document `index`, begin and end among them, as a view of the file: n may be 0, and
        nothing is read before its elements are. Raises SourceFailed if the index is damaged there."""

    @abstractmethod
    def lengths(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """How many tokens each of the documents (m,) has; reads the index only."""

    @abstractmethod
    def save_tokenizer(self, folder: Path) -> None:
        """Put the tokenizer that made the tokens there. Raises ConfigurationError if it did not come with them."""

    @abstractmethod
    def check(self, tokenizer: Tokenizer, add_bos: bool, add_eos: bool) -> None:
        """Raise ConfigurationError unless the tokens are those of `tokenizer`, with such begins and ends."""


Source = IndexedSource | StreamingSource | TokenizedSource | ChatSource


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
        if dataset == STORE:
            from trainer.data.store import open_store

            return open_store(dataset_path)
        if dataset == CHAT:
            from trainer.data.chat import open_chat

            return open_chat(dataset_path)
        if dataset == MEGATRON:
            from trainer.data.megatron import open_megatron

            return open_megatron(dataset_path)
        from trainer.data.tables import open_table

        return open_table(dataset, dataset_path, text_column)
    near = difflib.get_close_matches(dataset, LOCAL, n=1, cutoff=0.75)
    if near and "/" not in dataset and not dataset_path:
        raise ConfigurationError(f'dataset "{dataset}" is unknown; did you mean "{near[0]}"?')
    from trainer.data.hub import open_hub

    return open_hub(dataset, dataset_path, text_column)
