"""How a sequence is divided over context ranks, and which parts of it see each other. No torch here.

A causal token sees what comes before it, so late tokens cost more than early ones. The balanced split cuts a
sequence of T tokens for n ranks into 2n chunks and gives rank r the r-th from the head and the r-th from the tail,
which together cost the same for every r (Grattafiori et al. 2024, The Llama 3 Herd of Models, arXiv 2407.21783,
section 3.3.2). Over four ranks:

    chunk   0  1  2  3  4  5  6  7
    rank    0  1  2  3  3  2  1  0

The contiguous split gives each rank one part: the last rank then has almost twice the mean work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product


@dataclass(frozen=True)
class Piece:
    """One chunk of a sequence: the rank that has it, its local indices there, and its positions."""

    rank: int
    local: range
    positions: range


@dataclass(frozen=True)
class SequenceSplit:
    """The division of sequences over `degree` ranks, balanced or contiguous."""

    degree: int = 1
    balanced: bool = True

    @property
    def chunks_per_rank(self) -> int:
        return 2 if self.balanced and self.degree > 1 else 1

    @property
    def divisor(self) -> int:
        """What the length of a sequence must be a multiple of."""
        return self.degree * self.chunks_per_rank

    def chunks(self, rank: int, length: int) -> tuple[range, ...]:
        """The positions that a rank has of a sequence of `length` tokens, in the order in which it has them."""
        size = length // self.divisor
        indices = (rank,) if self.chunks_per_rank == 1 else (rank, 2 * self.degree - 1 - rank)
        return tuple(range(index * size, (index + 1) * size) for index in indices)

    def pieces_of_ranks(self, length: int) -> tuple[Piece, ...]:
        """Every rank's chunks, one rank after the other, with where they stand among that rank's tokens."""
        return tuple(
            Piece(rank, place, chunk)
            for rank in range(self.degree)
            for chunk, place in _placed(self.chunks(rank, length))
        )


@dataclass(frozen=True)
class Block:
    """A rectangle of the attention matrix in which something is seen.

    Attributes:
        queries: which of the rank's tokens, by their local index.
        keys: the same of the keys.
        causal: both are the same tokens, and a query sees the keys up to its own; otherwise it sees all of them.
        windowed: the sliding window hides some keys that are seen otherwise.
    """

    queries: range
    keys: range
    causal: bool
    windowed: bool = False


def visible_blocks(
    queries: Sequence[range], keys: Sequence[range], window: int | None = None
) -> tuple[Block, ...]:
    """The blocks to compute for tokens at the positions `queries` over keys at the positions `keys`.

    Every pair of a query and a key that it sees is in exactly one block. Those in which each query sees itself come
    first, so that what is added to them later always has something to be added to.

    Args:
        queries: positions in chunks, in the order of the tokens.
        keys: the same of the keys. A chunk of queries lies within one of keys or does not overlap with any.
        window: how many tokens each token sees, itself included; None: all before it.
    """
    if window is None and tuple(queries) == tuple(keys):
        # Tokens in the order of their positions: what is causal by position is causal by index.
        whole = range(sum(map(len, queries)))
        return (Block(whole, whole, causal=True),)
    blocks = [
        block
        for (query, at), (key, key_at) in product(_placed(queries), _placed(keys))
        for block in _blocks(query, at, key, key_at, window)
    ]
    if window is None:
        blocks = _joined(_joined(blocks, "keys", "queries"), "queries", "keys")
    return tuple(sorted(blocks, key=lambda block: not block.causal))


def overlap(one: range, other: range) -> range:
    """What is in both."""
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _placed(chunks: Sequence[range]) -> list[tuple[range, range]]:
    """Each chunk of positions with its local indices."""
    placed, at = [], 0
    for chunk in chunks:
        placed.append((chunk, range(at, at + len(chunk))))
        at += len(chunk)
    return placed


def _blocks(query: range, at: range, key: range, key_at: range, window: int | None) -> Iterator[Block]:
    """What one chunk of queries sees of one chunk of keys: themselves, and what is before all of them."""

    def block(first: int, last: int, *, causal: bool) -> Block:
        keys = range(key_at.start + first - key.start, key_at.start + last - key.start)
        farthest = query[-1] - first
        return Block(at, keys, causal, windowed=window is not None and farthest >= window)

    if key.start <= query.start < key.stop:
        yield block(query.start, query.stop, causal=True)
    first = key.start if window is None else max(key.start, query.start - window + 1)
    last = min(key.stop, query.start)
    if first < last:
        yield block(first, last, causal=False)


def _joined(blocks: Sequence[Block], axis: str, other: str) -> list[Block]:
    """Whole neighbours along one axis made one block: kernels like large ones."""
    joined: list[Block] = []
    for block in blocks:
        before = joined[-1] if joined else block
        mine, theirs = getattr(block, axis), getattr(before, axis)
        whole = not (block.causal or before.causal)
        if whole and theirs.stop == mine.start and getattr(block, other) == getattr(before, other):
            both = range(theirs.start, mine.stop)
            joined[-1] = replace(before, keys=both) if axis == "keys" else replace(before, queries=both)
        else:
            joined.append(block)
    return joined
