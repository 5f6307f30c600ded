"""Carries out the changes of `models.hf` on tensors, in both directions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from models.hf import RotaryHalves, Same, Stacked, Weight

ReadTheirs = Callable[[str, Sequence[int], Sequence[int]], Tensor]
"""Reads a part of one of their tensors: name, offset and length in each dimension."""


def read_ours(weight: Weight, read: ReadTheirs, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """A part of one of our tensors, of which no more of theirs is read than it needs (or the heads that it touches)."""
    match weight.change:
        case Same():
            return read(weight.theirs[0], offsets, lengths)
        case Stacked():
            experts = weight.theirs[offsets[0] : offsets[0] + lengths[0]]
            if not experts:
                return torch.empty(tuple(lengths))
            return torch.stack([read(name, offsets[1:], lengths[1:]) for name in experts])
        case RotaryHalves(head_dim):
            begin = offsets[0] // head_dim * head_dim
            end = -(-(offsets[0] + lengths[0]) // head_dim) * head_dim
            heads = read(weight.theirs[0], (begin, *offsets[1:]), (end - begin, *lengths[1:]))
            pairs = heads.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)
            return pairs[offsets[0] - begin : offsets[0] - begin + lengths[0]]


def to_theirs(weight: Weight, tensor: Tensor) -> list[Tensor]:
    """Their tensors, in the order of `weight.theirs`, from the whole of ours."""
    match weight.change:
        case Same():
            return [tensor]
        case Stacked():
            return list(tensor.unbind(0))
        case RotaryHalves(head_dim):
            pairs = tensor.unflatten(0, (-1, head_dim // 2, 2))
            return [pairs.transpose(1, 2).flatten(0, 2)]
