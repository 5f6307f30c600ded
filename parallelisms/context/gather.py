"""Context parallelism by gathering: every rank gets the keys and values of all, for one layer at a time.

Grattafiori et al. 2024, The Llama 3 Herd of Models (arXiv 2407.21783), section 3.3.2: with grouped queries, keys and
values are much smaller than queries, and one collective of the whole is simple and fast. The gathered ones are not
kept: the backward gathers them again. Their gradients are summed over the ranks by a reduce-scatter, in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallelisms.collectives import all_gathered, summed_part
from parallelisms.context.kernels import Gradients, Partial
from parallelisms.context.span import BackwardSum, Contribution, KeysAndValues, Span, Sum, rows
from parallelisms.context.split import overlap


def gather_forward(span: Span, q: Tensor, k: Tensor, v: Tensor) -> Partial:
    """Attention of this rank's queries (B, H, t, D) over all keys, of which it has k (B, KV, t, D) and v
    (B, KV, t, E). Collective over the group."""
    every = _gather(span, KeysAndValues.of(k, v))
    total = Sum(span, q, v.shape[-1])
    total.add(span.all_tokens, every.k, every.v)
    return total.result()


def gather_backward(
    span: Span, q: Tensor, k: Tensor, v: Tensor, whole: Partial, gradient: Tensor
) -> Gradients:
    """Gradients in fp32, from that of the output, (B, H, t, E). Collective over the group."""
    group, others = span.group, _OfRanks.like(span, k, v)
    total = BackwardSum(span, q, whole, gradient)
    every = _gather(span, KeysAndValues.of(k, v))
    for contribution in total.contributions(span.all_tokens, every.k, every.v):
        others.add(contribution)
    own = others.ranks[group.rank].like(summed_part(others.buffer, 0, group.collective))
    return Gradients(total.q, own.k, own.v)


class _OfRanks:
    """Gradients of the keys and values of the whole sequence, in fp32, by the rank that they belong to."""

    def __init__(self, span: Span, buffer: Tensor, ranks: list[KeysAndValues]) -> None:
        self.buffer = buffer
        self.ranks = ranks
        self._pieces = span.group.split.pieces_of_ranks(span.length)

    @classmethod
    def like(cls, span: Span, k: Tensor, v: Tensor) -> _OfRanks:
        """Zeros, for ranks that each have as many as this one has of k and v."""
        size = span.group.size
        buffer = k.new_zeros(size * (k.numel() + v.numel()), dtype=torch.float32)
        parts = buffer.view(size, -1)
        return cls(span, buffer, [KeysAndValues.within(part, k.shape, v.shape) for part in parts])

    def add(self, contribution: Contribution) -> None:
        """Add to the gradients of keys and values that are given by their positions."""
        first = contribution.keys.start
        for piece in self._pieces:
            positions = overlap(piece.positions, contribution.keys)
            if positions:
                shift = piece.local.start - piece.positions.start
                local = range(positions.start + shift, positions.stop + shift)
                given = range(positions.start - first, positions.stop - first)
                rank = self.ranks[piece.rank]
                rank.add(Contribution(local, rows(contribution.k, given), rows(contribution.v, given)))


def _gather(span: Span, own: KeysAndValues) -> KeysAndValues:
    """The keys and values of the whole sequence, in the order of their positions."""
    group = span.group
    received = all_gathered(own.buffer, 0, group.collective)
    ranks = [own.like(part) for part in received.view(group.size, -1)]
    shapes = (_lengthened(x.shape, span.length) for x in (own.k, own.v))
    every = KeysAndValues.within(torch.empty_like(received), *shapes)
    for piece in group.split.pieces_of_ranks(span.length):
        for whole, part in ((every.k, ranks[piece.rank].k), (every.v, ranks[piece.rank].v)):
            rows(whole, piece.positions).copy_(rows(part, piece.local))
    return every


def _lengthened(shape: torch.Size, length: int) -> torch.Size:
    """(B, KV, T, D) with another T."""
    return torch.Size((*shape[:2], length, shape[3]))
