"""What lies in the folder of a token store, and the check of what `store.json` claims before anything is mapped.

    store.json           what the store holds; written last, so that a folder without it is unfinished
    00000.tokens         the tokens of a shard's documents, one after the other: uint16 or uint32, little-endian
    00000.offsets        where each document of the shard begins, then where the last ends: uint64, documents + 1 of them
    bad_documents.jsonl  what was left out or repaired: kind, file, position, reason
    tokenizer/           the tokenizer, for runs that name none

Document i of the store is document i of its source: one without text, or left out, has no tokens but has its place, so
that a shuffled run reads the same order from the store as from the source. A document includes its begin and end
tokens. Files are named by their number and by nothing in `store.json`, so that nothing there leads out of the folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from trainer.errors import ConfigurationError

METADATA = "store.json"
PROGRESS = "progress.json"
BAD_DOCUMENTS = "bad_documents.jsonl"
TOKENIZER = "tokenizer"

OFFSET = np.dtype("<u8")
_LARGEST_METADATA = 64 << 20  # bytes: some 300,000 shards

Count = Annotated[int, Field(ge=0, le=1 << 56)]
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Checked(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class Shard(_Checked):
    """One pair of files; the digests are SHA-256 of their content."""

    documents: Annotated[Count, Field(ge=1)]
    tokens: Count
    tokens_digest: _Digest
    offsets_digest: _Digest


class Recipe(_Checked):
    """What the bytes of a store follow from; `source` is for people."""

    source: str
    source_fingerprint: str
    text_column: str
    tokenizer_fingerprint: str
    vocab_size: Annotated[int, Field(ge=1, le=1 << 31)]
    add_bos: bool
    add_eos: bool
    shard_tokens: Annotated[Count, Field(ge=1)]

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """The smallest of the two types that holds the vocabulary."""
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")

    def changes(self, other: Recipe) -> list[str]:
        """The fields that differ, but for the name of the source."""
        mine, theirs = self.model_dump(exclude={"source"}), other.model_dump(exclude={"source"})
        return [field for field in mine if mine[field] != theirs[field]]


class Metadata(_Checked):
    """The content of `store.json`."""

    format: Literal["stageline token store"] = "stageline token store"
    version: Literal[1] = 1
    recipe: Recipe
    dtype: Literal["uint16", "uint32"]
    documents: Annotated[Count, Field(ge=1)]
    tokens: Annotated[Count, Field(ge=1)]
    bad_documents: dict[str, Count]
    shards: Annotated[list[Shard], Field(min_length=1)]

    @model_validator(mode="after")
    def _sums_agree(self) -> Metadata:
        for name in ("documents", "tokens"):
            if sum(getattr(shard, name) for shard in self.shards) != getattr(self, name):
                raise ValueError(f"the shards do not hold {getattr(self, name)} {name} together")
        if self.dtype != self.recipe.dtype.name:
            raise ValueError(f"{self.dtype} is not the type of a vocabulary of {self.recipe.vocab_size}")
        return self


def tokens_file(folder: Path, shard: int) -> Path:
    return folder / f"{shard:05d}.tokens"


def offsets_file(folder: Path, shard: int) -> Path:
    return folder / f"{shard:05d}.offsets"


def read_metadata(folder: Path) -> Metadata:
    """What the store in `folder` holds, checked against itself and the sizes of its files.

    Raises ConfigurationError, with the file and the reason, if there is no finished store there, if `store.json` is not
    one's, or if a shard is missing, cut off, or a link out of the folder.
    """
    file = folder / METADATA
    if not file.is_file():
        raise ConfigurationError(f"token store {folder}: {_what_is_there(folder)}")
    try:
        with file.open("rb") as stream:
            content = stream.read(_LARGEST_METADATA + 1)
        if len(content) > _LARGEST_METADATA:
            raise ConfigurationError(f"{file}: larger than the description of a store can be")
        metadata = Metadata.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigurationError(
            f"{file}: no description of a token store: {where + ': ' if where else ''}{first['msg']}"
        ) from error
    except OSError as error:
        raise ConfigurationError(f"{file}: cannot be read: {error.strerror}") from error
    for number, shard in enumerate(metadata.shards):
        _check_size(folder, tokens_file(folder, number), shard.tokens * metadata.recipe.dtype.itemsize)
        _check_size(folder, offsets_file(folder, number), (shard.documents + 1) * OFFSET.itemsize)
    return metadata


def _what_is_there(folder: Path) -> str:
    if (folder / PROGRESS).is_file():
        return "is unfinished; run the same `stageline prepare` again, it goes on where it ended"
    if folder.is_dir():
        return f"holds no {METADATA}; `stageline prepare` makes a store"
    return "there is no such folder"


def _check_size(folder: Path, file: Path, expected: int) -> None:
    try:
        if file.is_symlink() and not file.resolve().is_relative_to(folder.resolve()):
            raise ConfigurationError(f"{file}: a link that leads out of the store")
        if not file.is_file():
            raise ConfigurationError(f"{file}: is missing from the store")
        size = file.stat().st_size
    except OSError as error:
        raise ConfigurationError(f"{file}: cannot be read: {error.strerror}") from error
    if size != expected:
        raise ConfigurationError(f"{file}: has {size} bytes, {METADATA} says {expected}")
