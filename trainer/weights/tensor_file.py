"""Parts of tensors out of safetensors files, and what tensors are in such a file."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from trainer.errors import ConfigurationError
from trainer.weights.safetensors_format import Entry

DTYPES = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
    }
)
"""The number formats in which weights are read."""

DTYPE_NAMES = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})


def read_region(path: Path, entry: Entry, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """A part of a tensor of a file: `lengths[i]` elements from `offsets[i]` in each dimension.

    Reads these bytes only, into memory of its own. Raises ConfigurationError if the file ends before them.
    """
    dtype = DTYPES[entry.dtype]
    tensor = torch.empty(tuple(lengths), dtype=dtype)
    if tensor.numel() == 0:
        return tensor
    target = tensor.reshape(-1).view(torch.uint8).numpy().data
    descriptor = os.open(path, os.O_RDONLY)
    try:
        filled = 0
        for begin, size in _runs(entry, offsets, lengths, dtype.itemsize):
            _read_exactly(descriptor, target[filled : filled + size], begin, path)
            filled += size
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)
    return tensor


def _runs(
    entry: Entry, offsets: Sequence[int], lengths: Sequence[int], itemsize: int
) -> list[tuple[int, int]]:
    """Position and size, in bytes, of each unbroken run of the region in the file."""
    shape = entry.shape
    outer = len(shape)
    # Dimensions that are whole from the innermost on make one run together with the next one.
    while outer > 0 and (outer == len(shape) or lengths[outer] == shape[outer]):
        outer -= 1
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    run = math.prod(lengths[outer:]) * itemsize
    begins = itertools.product(*(range(o, o + n) for o, n in zip(offsets[:outer], lengths, strict=False)))
    inner = sum(o * s for o, s in zip(offsets[outer:], strides[outer:], strict=True))
    return [
        (entry.begin + (sum(i * s for i, s in zip(at, strides, strict=False)) + inner) * itemsize, run)
        for at in begins
    ]


def _read_exactly(descriptor: int, target: memoryview, position: int, path: Path) -> None:
    while target:
        count = os.preadv(descriptor, [target], position)
        if count == 0:
            raise ConfigurationError(f"{path} ends before the tensors that its header lists")
        target, position = target[count:], position + count


def data_of(tensor: Tensor) -> memoryview:
    """A tensor's elements as bytes, in order, in its own number format."""
    if not tensor.numel():
        return memoryview(b"")
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
