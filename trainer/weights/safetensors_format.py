"""The header of a safetensors file: read with mistrust, and written. No torch here.

    8 bytes              length n of the header, little-endian
    n bytes              JSON: {name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {...}}
    the rest             the tensors, one after the other, without gaps

The library `safetensors` maps files into memory, where every page that was read counts as the process's own, and
writes only what lies in memory as a whole. Here tensors are read and written piece by piece, so this is done by hand.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from trainer.errors import ConfigurationError

LONGEST_HEADER = 100_000_000  # bytes; the library's own limit
_METADATA = "__metadata__"

BYTES_PER_ELEMENT = MappingProxyType(
    {
        **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
        **dict.fromkeys(("F32", "I32", "U32"), 4),
        **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
        **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 1),
    }
)


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: `begin` and `end` are positions in the file, in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Planned:
    """A tensor that is to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * BYTES_PER_ELEMENT[self.dtype]


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a file by name, in the order of their data.

    Raises ConfigurationError, with the path, if the file cannot be read or does not hold what its header says.
    """
    try:
        with path.open("rb") as file:
            file_size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if file_size < 8 or length > min(file_size - 8, LONGEST_HEADER):
                raise _broken(path, f"its header of {length} bytes does not fit into the file of {file_size}")
            text = file.read(length)
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        table = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"its header is no table of tensors: {error}") from error
    if not isinstance(table, dict):
        raise _broken(path, "its header is no table of tensors")
    entries = [_entry(path, name, value, 8 + length) for name, value in table.items() if name != _METADATA]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    _check_gapless(path, entries, 8 + length, file_size)
    return {entry.name: entry for entry in entries}


def header(tensors: Sequence[Planned]) -> bytes:
    """The beginning of a file of these tensors, in this order, up to where their data begin."""
    table: dict[str, Any] = {_METADATA: {"format": "pt"}}
    position = 0
    for tensor in tensors:
        offsets = [position, position + tensor.size]
        table[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        position += tensor.size
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data are aligned
    return len(text).to_bytes(8, "little") + text


def _entry(path: Path, name: str, value: Any, data: int) -> Entry:
    """One entry, its parts of the right kind and its size that of its shape. `data`: where the data begin."""
    try:
        dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise _broken(path, f"its entry {name!r} lacks dtype, shape or data_offsets") from None
    numbers = [*shape, begin, end] if isinstance(shape, list) else [None]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise _broken(path, f"its entry {name!r} has a shape or offsets that are no whole numbers")
    if dtype not in BYTES_PER_ELEMENT:
        raise _broken(path, f"its entry {name!r} has the unknown dtype {dtype!r}")
    size = math.prod(shape) * BYTES_PER_ELEMENT[dtype]
    if end - begin != size:
        raise _broken(
            path, f"its entry {name!r} has {end - begin} bytes, its shape {shape} in {dtype} needs {size}"
        )
    return Entry(name, dtype, tuple(shape), data + begin, data + end)


def _check_gapless(path: Path, entries: Sequence[Entry], data: int, file_size: int) -> None:
    position = data
    for entry in entries:
        if entry.begin != position:
            raise _broken(path, f"the data of {entry.name!r} overlap others or leave a gap")
        position = entry.end
    if position != file_size:
        raise _broken(path, f"its tensors end at byte {position}, the file has {file_size}; was it cut off?")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name occurs twice")
    return table


def _broken(path: Path, reason: str) -> ConfigurationError:
    return ConfigurationError(f"{path} is not a sound safetensors file: {reason}")
