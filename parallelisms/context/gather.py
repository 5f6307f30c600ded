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
from parallelisms.context.span import BackwardSum, KeysAndValues, Span, Sum, rows


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
    every = _gather(span, KeysAndValues.of(k, v))
    summed = every.like(torch.zeros_like(every.buffer, dtype=torch.float32))
    total = BackwardSum(span, q, whole, gradient)
    for contribution in total.contributions(span.all_tokens, every.k, every.v):
        summed.add(contribution)
    own = _reduce_scatter(span, summed)
    return Gradients(total.q, own.k, own.v)


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


def _reduce_scatter(span: Span, summed: KeysAndValues) -> KeysAndValues:
    """The sums over the group of the gradients of this rank's keys and values."""
    group = span.group
    shapes = [_lengthened(x.shape, span.length // group.size) for x in (summed.k, summed.v)]
    sent = torch.empty_like(summed.buffer)
    ranks = [KeysAndValues.within(buffer, *shapes) for buffer in sent.view(group.size, -1)]
    for piece in group.split.pieces_of_ranks(span.length):
        for whole, part in ((summed.k, ranks[piece.rank].k), (summed.v, ranks[piece.rank].v)):
            rows(part, piece.local).copy_(rows(whole, piece.positions))
    own = summed_part(sent, 0, group.collective)
    return KeysAndValues.within(own, *shapes)


def _lengthened(shape: torch.Size, length: int) -> torch.Size:
    """(B, KV, T, D) with another T."""
    return torch.Size((*shape[:2], length, shape[3]))
