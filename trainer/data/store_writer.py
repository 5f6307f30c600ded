"""Writes a token store so that it can be interrupted anywhere and still gets the same bytes.

Documents are appended to the files of the shard that is open. Now and then what has been appended is put on the disk,
and then `progress.json` is replaced by one that says how much of each file counts. Whoever goes on cuts the files back
to that; what comes after is written again.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, BinaryIO

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainer.data.corpus import Bad
from trainer.data.store import file_digest
from trainer.data.store_format import (
    BAD_DOCUMENTS,
    METADATA,
    OFFSET,
    PROGRESS,
    TOKENIZER,
    Count,
    Metadata,
    Recipe,
    Shard,
    offsets_file,
    read_metadata,
    tokens_file,
)
from trainer.data.tokenizing import Encoded
from trainer.errors import ConfigurationError

_LOCK = ".lock"
_SECONDS_BETWEEN_COMMITS = 2.0


class _Progress(BaseModel):
    """How much of an unfinished store counts: finished shards, then so much of the open one."""

    model_config = ConfigDict(strict=True, extra="forbid")

    recipe: Recipe
    units: Count = 0
    documents: Count = 0
    tokens: Count = 0
    shards: list[Shard] = Field(default_factory=list)
    open_documents: Count = 0
    open_tokens: Count = 0
    bad_documents: dict[str, Count] = Field(default_factory=dict)
    bad_bytes: Annotated[int, Field(ge=0)] = 0


class StoreWriter:
    """The store in `folder` in the making; a context that holds the folder for itself.

    `finished` is what a store says that is there already, whole and of this recipe.
    """

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        """Raises ConfigurationError if the folder is being written, or holds a store of another recipe."""
        self._folder = folder
        self._type = recipe.dtype
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = (folder / _LOCK).open("wb")
        self._files: list[BinaryIO] = [self._lock]
        try:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ConfigurationError(f"{folder}: another `stageline prepare` is writing here") from error
            self.finished = read_metadata(folder) if (folder / METADATA).is_file() else None
            if self.finished is not None:
                _refuse_changes(folder, self.finished.recipe, recipe)
                return
            self._at = _read_progress(folder, recipe)
            self._go_on()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def units(self) -> int:
        """How many units of the corpus are in the store."""
        return self._at.units

    @property
    def documents(self) -> int:
        """How many documents are."""
        return self._at.documents

    @property
    def tokens(self) -> int:
        """How many tokens are."""
        return self._at.tokens

    @property
    def bad_documents(self) -> dict[str, int]:
        """How many documents had which fault."""
        return self._at.bad_documents

    def add(self, encoded: Encoded) -> None:
        """Append the documents of the next unit; puts all on the disk every few seconds."""
        tokens = np.frombuffer(encoded.tokens, self._type)
        ends = np.cumsum(np.frombuffer(encoded.lengths, np.uint64), dtype=np.int64)
        written = first = 0
        while first < len(ends):
            if self._at.open_tokens >= self._at.recipe.shard_tokens:
                self._close_shard()
            # Up to the document with which the shard is full.
            full = written + self._at.recipe.shard_tokens - self._at.open_tokens
            last = min(int(np.searchsorted(ends, full)) + 1, len(ends))
            end = int(ends[last - 1])
            self._append(tokens[written:end], ends[first:last] - written)
            written, first = end, last
        self._note(encoded.bad)
        self._at.units += 1
        if time.monotonic() - self._committed >= _SECONDS_BETWEEN_COMMITS:
            self.commit()

    def commit(self) -> None:
        """From here an interrupted run would go on."""
        for file in (self._tokens, self._offsets, self._bad):
            file.flush()
            os.fsync(file.fileno())
        _replace(self._folder / PROGRESS, self._at.model_dump_json().encode())
        self._committed = time.monotonic()

    def finish(self, tokenizer_files: Iterable[Path]) -> Metadata:
        """Close the last shard and write what makes the folder a store.

        Raises ConfigurationError if no document had a token.
        """
        if not self._at.tokens:
            raise ConfigurationError(f"{self._at.recipe.source}: none of the documents holds text")
        number = len(self._at.shards)
        if self._at.open_documents:
            self._end_shard()
        else:  # a run was interrupted just here
            tokens_file(self._folder, number).unlink()
            offsets_file(self._folder, number).unlink()
        self.commit()
        for file in tokenizer_files:
            target = self._folder / TOKENIZER / file.name
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target)
        at = self._at
        metadata = Metadata(
            recipe=at.recipe,
            dtype=self._type.name,  # type: ignore[arg-type]  # checked by the class itself
            documents=at.documents,
            tokens=at.tokens,
            bad_documents=dict(sorted(at.bad_documents.items())),
            shards=at.shards,
        )
        _replace(self._folder / METADATA, metadata.model_dump_json(indent=1).encode())
        (self._folder / PROGRESS).unlink()
        return metadata

    def close(self) -> None:
        """Let the folder go."""
        for file in reversed(self._files):
            file.close()
        self._files = []

    def _append(self, tokens: np.ndarray, ends: np.ndarray) -> None:
        """Whole documents to the open shard; `ends` count from the first of `tokens`."""
        self._tokens.write(tokens.data)
        self._tokens_digest.update(tokens.data)
        offsets = (ends + self._at.open_tokens).astype(OFFSET)
        self._offsets.write(offsets.data)
        self._offsets_digest.update(offsets.data)
        self._at.open_tokens += len(tokens)
        self._at.open_documents += len(ends)
        self._at.tokens += len(tokens)
        self._at.documents += len(ends)

    def _note(self, bad: Iterable[Bad]) -> None:
        for one in bad:
            words = {"fault": one.fault, "file": one.file, "position": one.position, "reason": one.reason}
            self._at.bad_bytes += self._bad.write(json.dumps(words).encode() + b"\n")
            self._at.bad_documents[one.fault] = self._at.bad_documents.get(one.fault, 0) + 1

    def _close_shard(self) -> None:
        self._end_shard()
        for file in (self._tokens, self._offsets):
            file.close()
            self._files.remove(file)
        self._open_shard()

    def _end_shard(self) -> None:
        for file in (self._tokens, self._offsets):
            file.flush()
            os.fsync(file.fileno())
        self._at.shards.append(
            Shard(
                documents=self._at.open_documents,
                tokens=self._at.open_tokens,
                tokens_digest=self._tokens_digest.hexdigest(),
                offsets_digest=self._offsets_digest.hexdigest(),
            )
        )
        self._at.open_documents = self._at.open_tokens = 0

    def _go_on(self) -> None:
        """Cut every file back to what counts, and open those that grow."""
        at = self._at
        later = len(at.shards) + 1
        while tokens_file(self._folder, later).exists() or offsets_file(self._folder, later).exists():
            tokens_file(self._folder, later).unlink(missing_ok=True)
            offsets_file(self._folder, later).unlink(missing_ok=True)
            later += 1
        for number, shard in enumerate(at.shards):
            _require(tokens_file(self._folder, number), shard.tokens * self._type.itemsize)
            _require(offsets_file(self._folder, number), (shard.documents + 1) * OFFSET.itemsize)
        self._bad = self._open(self._folder / BAD_DOCUMENTS, at.bad_bytes)
        self._open_shard()
        self._committed = time.monotonic()

    def _open_shard(self) -> None:
        at, number = self._at, len(self._at.shards)
        size = at.open_tokens * self._type.itemsize
        self._tokens = self._open(tokens_file(self._folder, number), size)
        self._tokens_digest = file_digest(tokens_file(self._folder, number), size)
        size = (at.open_documents + 1) * OFFSET.itemsize if at.open_documents else 0
        self._offsets = self._open(offsets_file(self._folder, number), size)
        self._offsets_digest = file_digest(offsets_file(self._folder, number), size)
        if not size:
            zero = bytes(OFFSET.itemsize)
            self._offsets.write(zero)
            self._offsets_digest.update(zero)

    def _open(self, path: Path, size: int) -> BinaryIO:
        """The file, of which the first `size` bytes stay, to append to."""
        path.touch()
        _require(path, size, exactly=False)
        os.truncate(path, size)
        file = path.open("ab")
        self._files.append(file)
        return file


def _read_progress(folder: Path, recipe: Recipe) -> _Progress:
    file = folder / PROGRESS
    if not file.is_file():
        if tokens_file(folder, 0).exists():
            raise ConfigurationError(
                f"{folder}: holds shards, but neither {METADATA} nor {PROGRESS}; remove it to begin anew"
            )
        progress = _Progress(recipe=recipe)
        _replace(file, progress.model_dump_json().encode())
        return progress
    try:
        progress = _Progress.model_validate_json(file.read_bytes())
    except ValidationError as error:
        raise ConfigurationError(f"{file}: damaged; remove {folder} to begin anew") from error
    _refuse_changes(folder, progress.recipe, recipe)
    return progress


def _refuse_changes(folder: Path, made: Recipe, wanted: Recipe) -> None:
    changes = made.changes(wanted)
    if changes:
        raise ConfigurationError(
            f"{folder}: was begun with another {' and '.join(field.replace('_', ' ') for field in changes)}; "
            "give another --output, or remove that one"
        )


def _require(file: Path, size: int, *, exactly: bool = True) -> None:
    present = file.stat().st_size if file.exists() else 0
    if present < size or (exactly and present != size):
        raise ConfigurationError(
            f"{file}: has {present} bytes, {PROGRESS} says {size}; remove {file.parent} to begin anew"
        )


def _replace(file: Path, content: bytes) -> None:
    """All of the file or none of it, also if the power fails."""
    temporary = file.with_name(f"{file.name}.tmp")
    with temporary.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(file)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
