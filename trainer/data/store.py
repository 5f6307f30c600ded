"""A token store that is read: documents by index, straight from memory-mapped files.

Opening looks at `store.json` and the sizes of the files. A shard is mapped when a document of it is asked for; nothing
of a document is read before its tokens are.
"""

from __future__ import annotations

import hashlib
import shutil
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainer.data.errors import SourceFailed
from trainer.data.sources import TokenizedSource
from trainer.data.store_format import (
    OFFSET,
    TOKENIZER,
    Metadata,
    offsets_file,
    read_metadata,
    tokens_file,
)
from trainer.data.tokenizer import BYTE, Tokenizer
from trainer.errors import ConfigurationError

_CHUNK = 1 << 22
_LARGEST_TOKENIZER = 1 << 28  # bytes of one of its files


@dataclass(frozen=True)
class _Mapped:
    tokens: npt.NDArray[np.unsignedinteger]
    offsets: npt.NDArray[np.uint64]


class TokenStore(TokenizedSource):
    """The documents of a finished store; may be used by several threads and after a fork."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigurationError if there is no finished store, or its files are not those of its description."""
        self.folder = folder
        self.metadata = read_metadata(folder)
        self.name = f'dataset "store" ({folder})'
        self.fingerprint = _fingerprint(self.metadata)
        self.total_tokens = self.metadata.tokens
        shards = self.metadata.shards
        # The first document of each shard, and the end of the last.
        self._first = [0, *accumulate(shard.documents for shard in shards)]
        self._mapped: dict[int, _Mapped] = {}

    def __reduce__(self) -> tuple[type[TokenStore], tuple[Path]]:
        # Another process maps the files itself.
        return TokenStore, (self.folder,)

    def __len__(self) -> int:
        return self.metadata.documents

    def read(self, index: int) -> npt.NDArray[np.unsignedinteger]:
        if not 0 <= index < len(self):
            raise IndexError(f"{index} is not in 0 ... {len(self) - 1}")
        shard = bisect_right(self._first, index) - 1
        mapped = self._shard(shard)
        place = index - self._first[shard]
        begin, end = int(mapped.offsets[place]), int(mapped.offsets[place + 1])
        if not begin <= end <= len(mapped.tokens):
            raise self._damaged(shard, index)
        return mapped.tokens[begin:end]

    def lengths(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        shards = np.searchsorted(self._first, indices, side="right") - 1
        lengths = np.empty(len(indices), dtype=np.int64)
        for shard in np.unique(shards):
            chosen = shards == shard
            mapped, place = self._shard(int(shard)), indices[chosen] - self._first[shard]
            begin, end = mapped.offsets[place], mapped.offsets[place + 1]
            wrong = (begin > end) | (end > len(mapped.tokens))
            if wrong.any():
                raise self._damaged(int(shard), int(indices[chosen][wrong][0]))
            lengths[chosen] = end - begin
        return lengths

    def check(self, tokenizer: Tokenizer, add_bos: bool, add_eos: bool) -> None:
        recipe = self.metadata.recipe
        if tokenizer.fingerprint != recipe.tokenizer_fingerprint:
            raise ConfigurationError(
                f"{self.name} was made with another tokenizer ({recipe.vocab_size} tokens, fingerprint "
                f"{recipe.tokenizer_fingerprint}) than model.tokenizer_path ({tokenizer.vocab_size} tokens, "
                f"{tokenizer.fingerprint}); the store's own is used where that key is unset"
            )
        for key, made, wanted in (
            ("add_bos", recipe.add_bos, add_bos),
            ("add_eos", recipe.add_eos, add_eos),
        ):
            if made != wanted:
                raise ConfigurationError(
                    f"{self.name} was made with {key} = {str(made).lower()}, data.{key} is {str(wanted).lower()}"
                )

    def save_tokenizer(self, folder: Path) -> None:
        held = self.folder / TOKENIZER
        files = sorted(held.iterdir()) if held.is_dir() else []
        if not files:
            named = BYTE if self.metadata.recipe.tokenizer_fingerprint == BYTE else "that of the store"
            raise ConfigurationError(
                f"{self.name} brings no tokenizer along; set model.tokenizer_path to {named}"
            )
        for file in files:
            if file.is_symlink() or not file.is_file() or file.stat().st_size > _LARGEST_TOKENIZER:
                raise ConfigurationError(f"{file}: no file of a tokenizer")
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            shutil.copyfile(file, folder / file.name)

    def damaged_files(self) -> Iterator[Path]:
        """The files whose content is not what it was when the store was made; reads all of it."""
        for number, shard in enumerate(self.metadata.shards):
            for file, digest in (
                (tokens_file(self.folder, number), shard.tokens_digest),
                (offsets_file(self.folder, number), shard.offsets_digest),
            ):
                if file_digest(file).hexdigest() != digest:
                    yield file

    def _shard(self, number: int) -> _Mapped:
        # Two threads may both map a shard, which costs little; the last one is kept.
        if number not in self._mapped:
            self._mapped[number] = self._map(number)
        return self._mapped[number]

    def _map(self, number: int) -> _Mapped:
        shard = self.metadata.shards[number]
        try:
            return _Mapped(
                _array(tokens_file(self.folder, number), self.metadata.recipe.dtype, shard.tokens),
                _array(offsets_file(self.folder, number), OFFSET, shard.documents + 1),
            )
        except (OSError, ValueError) as error:
            raise SourceFailed(f"{self.name}: shard {number} cannot be read: {error}") from error

    def _damaged(self, shard: int, index: int) -> SourceFailed:
        return SourceFailed(
            f"{offsets_file(self.folder, shard)}: damaged at document {index}; "
            f"`stageline prepare --verify {self.folder}` tells what else is"
        )


def open_store(dataset_path: str) -> TokenStore:
    """The store in the folder. Raises ConfigurationError if there is none that is whole."""
    return TokenStore(Path(dataset_path).expanduser())


def file_digest(file: Path, size: int | None = None) -> hashlib._Hash:
    """The digest of a file's content, or of its first `size` bytes, to which more may be added."""
    digest = hashlib.sha256()
    left = file.stat().st_size if size is None else size
    with file.open("rb", buffering=0) as stream:
        while left and (chunk := stream.read(min(left, _CHUNK))):
            digest.update(chunk)
            left -= len(chunk)
    return digest


def _array(file: Path, dtype: np.dtype, count: int) -> np.ndarray:
    # A plain view of the mapping: slices of numpy's own class for it cost ten times as much.
    return np.asarray(np.memmap(file, dtype=dtype, mode="r", shape=(count,))) if count else np.empty(0, dtype)


def _fingerprint(metadata: Metadata) -> str:
    digest = hashlib.sha256()
    for shard in metadata.shards:
        digest.update(f"{shard.tokens_digest} {shard.offsets_digest}\n".encode())
    return digest.hexdigest()[:16]
