"""What is done to tensors on the way: every part is the part of the whole, and everything can be undone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.hf import RotaryHalves, Same, Stacked, Weight
from trainer.weights.change import ReadTheirs, read_ours, to_theirs


def weights() -> st.SearchStrategy[Weight]:
    width = st.integers(1, 3)
    heads, half = st.integers(1, 4), st.integers(1, 4)
    return st.one_of(
        st.builds(lambda a, b: Weight("w", (a, b), ("t",), Same()), width, width),
        st.builds(
            lambda h, d, w: Weight("w", (h * 2 * d, w), ("t",), RotaryHalves(2 * d)), heads, half, width
        ),
        st.builds(lambda d: Weight("w", (2 * d,), ("t",), RotaryHalves(2 * d)), half),
        st.builds(
            lambda e, a, b: Weight("w", (e, a, b), tuple(f"t{i}" for i in range(e)), Stacked()),
            *(st.integers(1, 4), width, width),
        ),
    )


def reading(tensors: Mapping[str, Tensor]) -> ReadTheirs:
    def read(name: str, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        return tensors[name][tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]

    return read


@settings(max_examples=60, deadline=None)
@given(weight=weights(), data=st.data())
def test_any_part_of_ours_is_that_part_of_the_whole_and_changing_back_gives_theirs(
    weight: Weight, data: st.DataObject
) -> None:
    whole = torch.arange(torch.Size(weight.shape).numel()).reshape(weight.shape)
    theirs = dict(zip(weight.theirs, to_theirs(weight, whole), strict=True))
    assert all(tuple(tensor.shape) == weight.their_shape() for tensor in theirs.values())
    offsets = [data.draw(st.integers(0, size - 1)) for size in weight.shape]
    lengths = [data.draw(st.integers(1, size - o)) for size, o in zip(weight.shape, offsets, strict=True)]
    part = read_ours(weight, reading(theirs), offsets, lengths)
    assert torch.equal(part, whole[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))])


def test_rows_of_rotated_heads_are_where_the_data_says_and_pairs_become_neighbours() -> None:
    """Case C3: feature i and i + 4 of a head of 8 there are 2i and 2i + 1 here."""
    change = RotaryHalves(8)
    assert [change.theirs(row) for row in range(16)] == [
        *(0, 4, 1, 5, 2, 6, 3, 7),
        *(8, 12, 9, 13, 10, 14, 11, 15),
    ]
    theirs = torch.arange(16).unsqueeze(1)
    ours = read_ours(Weight("w", (16, 1), ("t",), change), reading({"t": theirs}), (0, 0), (16, 1))
    assert ours.flatten().tolist() == [change.theirs(row) for row in range(16)]
