"""The division of a sequence over context ranks: complete, in order, balanced, and every visible pair computed once."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from parallelisms.context.split import SequenceSplit, visible_blocks

SPLITS = st.builds(SequenceSplit, st.integers(1, 5), st.booleans())
CHUNK = st.integers(1, 4)
WINDOW = st.none() | st.integers(1, 30)


def positions(chunks: Sequence[range]) -> list[int]:
    return [position for chunk in chunks for position in chunk]


def seen(queries: list[int], keys: list[int], window: int | None) -> set[tuple[int, int]]:
    """Every pair of local indices of which the first sees the second, by definition."""
    return {
        (i, j)
        for i, query in enumerate(queries)
        for j, key in enumerate(keys)
        if key <= query and (window is None or query - key < window)
    }


@given(SPLITS, CHUNK)
def test_every_token_is_with_one_rank_and_all_ranks_have_as_many_in_order(
    split: SequenceSplit, chunk: int
) -> None:
    length = split.divisor * chunk
    parts = [positions(split.chunks(rank, length)) for rank in range(split.degree)]
    assert sorted(position for part in parts for position in part) == list(range(length))
    assert {len(part) for part in parts} == {length // split.degree}
    assert all(part == sorted(part) for part in parts)
    for piece in split.pieces_of_ranks(length):
        assert [parts[piece.rank][at] for at in piece.local] == list(piece.positions)
    assert sum(len(piece.local) for piece in split.pieces_of_ranks(length)) == length


@given(SPLITS, CHUNK)
def test_balanced_ranks_see_equally_many_keys(split: SequenceSplit, chunk: int) -> None:
    length = split.divisor * chunk
    work = [sum(p + 1 for p in positions(split.chunks(rank, length))) for rank in range(split.degree)]
    assert (len(set(work)) == 1) == (split.balanced or split.degree == 1)


@given(SPLITS, CHUNK, WINDOW, st.data())
def test_every_pair_that_is_seen_is_in_one_block(
    split: SequenceSplit, chunk: int, window: int | None, data: st.DataObject
) -> None:
    length = split.divisor * chunk
    rank = data.draw(st.integers(0, split.degree - 1))
    owner = data.draw(st.none() | st.integers(0, split.degree - 1))
    queries = split.chunks(rank, length)
    keys = (range(length),) if owner is None else split.chunks(owner, length)
    at, of = positions(queries), positions(keys)
    computed: list[tuple[int, int]] = []
    for block in visible_blocks(queries, keys, window):
        for i in block.queries:
            for j in block.keys:
                later = block.causal and j - block.keys.start > i - block.queries.start
                outside = block.windowed and window is not None and at[i] - of[j] >= window
                if not later and not outside:
                    computed.append((i, j))
    assert sorted(computed) == sorted(seen(at, of, window))


@given(SPLITS, CHUNK, WINDOW)
def test_what_a_query_sees_of_itself_comes_first(
    split: SequenceSplit, chunk: int, window: int | None
) -> None:
    """Sums over blocks begin with a block in which every query sees something."""
    length = split.divisor * chunk
    for rank in range(split.degree):
        for keys in (split.chunks(rank, length), (range(length),)):
            begun: set[int] = set()
            for block in visible_blocks(split.chunks(rank, length), keys, window):
                assert block.causal == begun.isdisjoint(block.queries)
                assert block.causal or begun.issuperset(block.queries)
                begun.update(block.queries)
            assert begun == set(range(length // split.degree))
