"""A seeded permutation of 0 ... n - 1 computed element by element, with no table of n numbers.

A Feistel network over the smallest even number of bits that holds n - 1, walked along its cycle until the value
is below n (J. Black and P. Rogaway, "Ciphers with arbitrary finite domains", 2002, section 4). The result is part
of what a checkpoint's position means, so it rests on no library's random generator, whose numbers may change.
"""

from __future__ import annotations

import hashlib

_ROUNDS = 6
_WORD = (1 << 64) - 1


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
