"""Context parallelism by heads: every rank attends over whole sequences with a part of the heads.

Jacobs et al. 2023, DeepSpeed Ulysses (arXiv 2309.14509): an all-to-all turns parts of the sequence with all heads into
the whole sequence with a part of the heads, and another one turns the result back. Attention in between is that of
one process, kernel and masks included. Where there are fewer key and value heads than ranks, each goes to several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from models.layers.sequences import Sequences
from parallelisms.context.span import Group, Span, rows

_ops = torch.ops._c10d_functional

Attention = Callable[[Tensor, Tensor, Tensor, Sequences], Tensor]


def attend_by_heads(
    span: Span,
    attention: Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    masks: Mapping[int | None, Any],
) -> Tensor:
    """Attention of this rank's queries (B, H, t, D) over all keys, of which it has k (B, KV, t, D) and v
    (B, KV, t, E). H is a multiple of the ranks n; KV is one, or divides n. `masks` are those of whole
    sequences, see `Sequences`. Collective over the group.

    Returns (B, H, t, E).
    """
    group = span.group
    copies = -(-group.size // k.shape[1])
    if copies > 1:
        k, v = k.repeat_interleave(copies, dim=1), v.repeat_interleave(copies, dim=1)
    q, k, v = (_Exchange.apply(x, group, span.length, True) for x in (q, k, v))
    places = torch.arange(span.length, device=q.device)
    y = attention(q, k, v, Sequences(places, span.documents, masks))
    return _Exchange.apply(y, group, span.length, False)


class _Exchange(torch.autograd.Function):
    """(B, H, t, D) of this rank's tokens to (B, H / n, T, D) of its heads, or back; each is the other's backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, length: int, to_heads: bool) -> Tensor:
        ctx.group, ctx.length, ctx.to_heads = group, length, to_heads
        return _to_heads(x, group, length) if to_heads else _to_tokens(x, group, length)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        back = _to_tokens if ctx.to_heads else _to_heads
        return back(gradients[0], ctx.group, ctx.length), None, None, None


def _to_heads(x: Tensor, group: Group, length: int) -> Tensor:
    received = _exchanged(torch.stack(x.chunk(group.size, dim=1)), group)
    whole = x.new_empty((x.shape[0], x.shape[1] // group.size, length, x.shape[3]))
    for piece in group.split.pieces_of_ranks(length):
        rows(whole, piece.positions).copy_(rows(received[piece.rank], piece.local))
    return whole


def _to_tokens(x: Tensor, group: Group, length: int) -> Tensor:
    parts = x.new_empty((group.size, *x.shape[:2], length // group.size, x.shape[3]))
    for piece in group.split.pieces_of_ranks(length):
        rows(parts[piece.rank], piece.local).copy_(rows(x, piece.positions))
    return _exchanged(parts, group).transpose(0, 1).flatten(1, 2)


def _exchanged(parts: Tensor, group: Group) -> Tensor:
    """Part r of this rank to rank r, for part s of it from every rank s."""
    once = [1] * group.size
    received: Tensor = _ops.wait_tensor(_ops.all_to_all_single(parts, once, once, group.collective.name))
    return received
