"""Small corpora in files, stores made of them, and what their bytes are, for the tests of token stores."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from trainer.data.corpora import open_corpus
from trainer.data.preparation import OnError, Preparation, Prepared, prepare

_MAY_DIFFER = {".lock"}


def write_lines(file: Path, texts: Sequence[str]) -> Path:
    """A file of JSON lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return file


def make_store(
    output: Path,
    dataset: str,
    path: Path,
    *,
    tokenizer: str | Path = "byte",
    workers: int = 1,
    shard_tokens: int = 1 << 20,
    on_error: OnError = OnError.SKIP,
) -> Prepared:
    """The store of a corpus."""
    corpus = open_corpus(dataset, str(path), "text")
    return prepare(
        Preparation(corpus, tokenizer, output, workers, shard_tokens=shard_tokens, on_error=on_error)
    )


def content(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in _MAY_DIFFER]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
