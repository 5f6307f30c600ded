"""A seeded permutation of 0 ... n - 1 computed element by element, with no table of n numbers.

A Feistel network over the smallest even number of bits that holds n - 1, walked along its cycle until the value
is below n (J. Black and P. Rogaway, "Ciphers with arbitrary finite domains", 2002, section 4). The result is part
of what a checkpoint's position means, so it rests on no library's random generator, whose numbers may change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

_ROUNDS = 6
_WORD = (1 << 64) - 1
_BLOCK = 1024


class Permutation:
    """The permutation of `count` elements that belongs to the numbers in `key`."""

    def __init__(self, count: int, *key: int) -> None:
        self._count = count
        self._half = max(1, (max(0, count - 1).bit_length() + 1) // 2)
        self._mask = (1 << self._half) - 1
        digest = hashlib.blake2b(repr(key).encode(), digest_size=8 * _ROUNDS).digest()
        self._round_keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS)]

    def __getitem__(self, index: int) -> int:
        """Where `index` goes, 0 <= index < count."""
        if not 0 <= index < self._count:
            raise IndexError(f"{index} is not in 0 ... {self._count - 1}")
        value = self._encipher(index)
        while value >= self._count:  # at most 4 times on average: the domain is less than 4 n
            value = self._encipher(value)
        return value

    def walk(self, begin: int) -> Iterator[int]:
        """Where `begin` goes, and all after it: many computed at a time, a tenth of the cost of one by one."""
        while begin < self._count:
            end = min(begin + _BLOCK, self._count)
            yield from self._many(np.arange(begin, end, dtype=np.uint64)).tolist()
            begin = end

    def _many(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        values = self._encipher_many(values)
        while len(outside := np.flatnonzero(values >= self._count)):
            values[outside] = self._encipher_many(values[outside])
        return values

    def _encipher_many(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        half, mask = np.uint64(self._half), np.uint64(self._mask)
        left, right = values >> half, values & mask
        for key in self._round_keys:
            left, right = right, left ^ (_mix_many(right ^ np.uint64(key)) & mask)
        return left << half | right

    def _encipher(self, value: int) -> int:
        left, right = value >> self._half, value & self._mask
        for key in self._round_keys:
            left, right = right, left ^ (_mix(right ^ key) & self._mask)
        return left << self._half | right


def _mix(value: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea, Flood, 2014)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _WORD
    return value ^ (value >> 31)


def _mix_many(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The same of each; products of arrays are taken modulo 2^64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
