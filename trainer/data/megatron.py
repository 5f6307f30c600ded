"""Indexed data sets of Megatron-LM, as its `tools/preprocess_data.py` writes them, read without a copy.

Source: `megatron/core/datasets/indexed_dataset.py`, version 1. `NAME.bin` holds tokens; `NAME.idx`, little-endian:

    9 bytes "MMIDIDX\\0\\0" | u64 version 1 | u8 type of the tokens | u64 sequences s | u64 document boundaries d
    i32 length of each sequence (s) | i64 its first byte in .bin (s) | i64 sequence that begins each document (d)

What the tokens mean is not written there: that they are the tokenizer's and begin and end as `[data]` says is for the
user to know. Here a sequence is a document; a document of several sequences (sentences) is that many.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainer.data.errors import SourceFailed
from trainer.data.sources import TokenizedSource
from trainer.data.tokenizer import Tokenizer
from trainer.errors import ConfigurationError

_MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_PER_SEQUENCE = 4 + 8


class MegatronData(TokenizedSource):
    """The sequences of NAME.bin and NAME.idx."""

    def __init__(self, prefix: Path) -> None:
        """`prefix` is the path without .bin and .idx. Raises ConfigurationError, with the file, for what is missing,
        cut off or of another kind."""
        index, tokens = prefix.with_name(f"{prefix.name}.idx"), prefix.with_name(f"{prefix.name}.bin")
        self.name = f'dataset "megatron" ({prefix})'
        self._prefix = prefix
        try:
            with index.open("rb") as stream:
                header = stream.read(_HEADER.size)
            sizes = index.stat().st_size, tokens.stat().st_size
            count, self._type = _checked(index, header, *sizes)
            self._lengths = _array(index, "<i4", _HEADER.size, count)
            self._pointers = _array(index, "<i8", _HEADER.size + 4 * count, count)
            self._tokens = _array(tokens, self._type, 0, sizes[1] // self._type.itemsize)
        except OSError as error:
            raise ConfigurationError(f"{error.filename}: cannot be read: {error.strerror}") from error
        self.total_tokens = len(self._tokens)
        self.fingerprint = hashlib.sha256(header + repr(sizes).encode()).hexdigest()[:16]

    def __reduce__(self) -> tuple[type[MegatronData], tuple[Path]]:
        # Another process maps the files itself.
        return MegatronData, (self._prefix,)

    def __len__(self) -> int:
        return len(self._lengths)

    def read(self, index: int) -> npt.NDArray[np.integer]:
        if not 0 <= index < len(self):
            raise IndexError(f"{index} is not in 0 ... {len(self) - 1}")
        begin, odd = divmod(int(self._pointers[index]), self._type.itemsize)
        length = int(self._lengths[index])
        if odd or length < 0 or not 0 <= begin <= begin + length <= len(self._tokens):
            raise SourceFailed(f"{self.name}: the index is damaged at sequence {index}")
        return self._tokens[begin : begin + length]

    def lengths(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        lengths = self._lengths[indices].astype(np.int64)
        if (lengths < 0).any():
            raise SourceFailed(f"{self.name}: the index is damaged at sequence {indices[lengths < 0][0]}")
        return lengths

    def save_tokenizer(self, folder: Path) -> None:
        raise ConfigurationError(
            f"{self.name} brings no tokenizer along; set model.tokenizer_path to that of the data"
        )

    def check(self, tokenizer: Tokenizer, add_bos: bool, add_eos: bool) -> None:
        """Nothing in the files tells; tokens outside of the vocabulary are found when they are read."""


def open_megatron(dataset_path: str) -> MegatronData:
    """The data set whose .bin or .idx file, or whose path without these endings, is given."""
    path = Path(dataset_path).expanduser()
    return MegatronData(path.with_suffix("") if path.suffix in (".bin", ".idx") else path)


def _checked(index: Path, header: bytes, index_size: int, tokens_size: int) -> tuple[int, np.dtype]:
    """The number of sequences and the type of the tokens, once the sizes of both files allow them."""
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise ConfigurationError(f"{index}: no index of a Megatron data set")
    _, version, code, count, boundaries = _HEADER.unpack(header)
    if version != 1 or code not in _TYPES:
        raise ConfigurationError(f"{index}: version {version} and type {code} of tokens are not read here")
    expected = _HEADER.size + _PER_SEQUENCE * count + 8 * boundaries
    # Data sets with modes (images between text) have a byte more for each sequence.
    if count == 0 or index_size not in (expected, expected + count):
        raise ConfigurationError(f"{index}: has {index_size} bytes, {count} sequences need {expected}")
    dtype = np.dtype(_TYPES[code])
    if tokens_size == 0 or tokens_size % dtype.itemsize:
        raise ConfigurationError(f"{index.with_suffix('.bin')}: {tokens_size} bytes are no {dtype} tokens")
    return count, dtype


def _array(file: Path, dtype: npt.DTypeLike, offset: int, count: int) -> np.ndarray:
    return np.asarray(np.memmap(file, dtype=dtype, mode="r", offset=offset, shape=(count,)))
