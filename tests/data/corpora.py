"""Small data, in memory and in files, and configurations, for the tests of the data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainer.config.schema import Config
from trainer.data.sources import IndexedSource, StreamingSource

SENTENCES = (
    "The quick brown fox jumps over the lazy dog.\n",
    "def f(x):\n    if x:\n        return x + 1\n    return None\n",
    "Grüße aus München — 数学 und Ελληνικά 🙂\n",
    "\tสวัสดี\r\n  with  spaces  \n\n\n",
)


class ListSource(IndexedSource):
    """The texts of a list; remembers which were read."""

    def __init__(self, texts: Sequence[str], name: str = "a list") -> None:
        self.name = name
        self.fingerprint = f"{len(texts)} texts"
        self.texts = list(texts)
        self.reads: list[int] = []

    def __len__(self) -> int:
        return len(self.texts)

    def read(self, index: int) -> str:
        self.reads.append(index)
        return self.texts[index]


class ListStream(StreamingSource):
    """The same, one after the other; remembers where it was opened."""

    def __init__(self, texts: Sequence[str], name: str = "a stream") -> None:
        self.name = name
        self.fingerprint = f"{len(texts)} texts"
        self.texts = list(texts)
        self.starts: list[int] = []

    def documents(self, start: int) -> Iterator[str]:
        self.starts.append(start)
        yield from self.texts[start:]


def configuration(
    *,
    training: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    validation: dict[str, Any] | None = None,
) -> Config:
    """A configuration with batches of 2 sequences of 16 tokens where nothing else is given."""
    tables = {
        "training": {"batch_size": 2, "seq_len": 16} | (training or {}),
        "data": data or {},
        "validation": validation or {},
    }
    return Config.model_validate(tables)


def write_texts(folder: Path, texts: Sequence[str], suffix: str = ".txt") -> Path:
    """A file per text, named in their order."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number:04d}{suffix}").write_bytes(text.encode())
    return folder
