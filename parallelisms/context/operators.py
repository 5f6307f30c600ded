"""Attention across ranks as one operation of torch, which the compiler and checkpointing take as a whole.

The compiler neither looks inside nor cuts the layer's graph in two. Checkpointing by operation keeps the result, not
that of every block, and does not ask other ranks again for their keys. What is kept for the backward is what attention
of one process keeps: queries, the rank's own keys and values, the output and the sums of the softmax.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parallelisms import collectives
from parallelisms.context.gather import gather_backward, gather_forward
from parallelisms.context.kernels import Gradients, Partial
from parallelisms.context.ring import ring_backward, ring_forward
from parallelisms.context.span import Group, Span
from parallelisms.context.split import SequenceSplit


def attend_across_ranks(span: Span, q: Tensor, k: Tensor, v: Tensor, *, ring: bool) -> Tensor:
    """Attention of this rank's queries (B, H, t, D) over all keys, of which it has k (B, KV, t, D) and v
    (B, KV, t, E): in a ring, or by gathering them. Collective over the group. Returns (B, H, t, E)."""
    group = span.group
    output, _ = _attend(
        q,
        k,
        v,
        span.documents,
        ring,
        group.collective.name,
        group.rank,
        group.size,
        group.split.balanced,
        span.length,
        span.scale,
        span.window,
    )
    return output


@torch.library.custom_op("stageline::attend_across_ranks", mutates_args=())
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    ring: bool,
    group: str,
    rank: int,
    degree: int,
    balanced: bool,
    length: int,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    span = _span(documents, group, rank, degree, balanced, length, scale, window)
    whole = (ring_forward if ring else gather_forward)(span, q, k, v)
    return whole.output, whole.lse


@torch.library.custom_op("stageline::attend_across_ranks_backward", mutates_args=())
def _attend_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    lse: Tensor,
    documents: Tensor | None,
    ring: bool,
    group: str,
    rank: int,
    degree: int,
    balanced: bool,
    length: int,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    span = _span(documents, group, rank, degree, balanced, length, scale, window)
    gradients: Gradients = (ring_backward if ring else gather_backward)(
        span, q, k, v, Partial(output, lse), gradient
    )
    # Results of an operation share no memory: those of keys and values came in one message.
    return gradients.q.to(q.dtype), gradients.k.to(k.dtype), gradients.v.to(v.dtype, copy=True)


def _span(
    documents: Tensor | None,
    group: str,
    rank: int,
    degree: int,
    balanced: bool,
    length: int,
    scale: float,
    window: int | None,
) -> Span:
    members = Group(collectives.Group(group, degree, rank), SequenceSplit(degree, balanced))
    return Span(members, length, scale, window, documents)


@_attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, heads, length, _width = q.shape
    output = q.new_empty((batch, length, heads, v.shape[-1])).transpose(1, 2)
    return output, q.new_empty((batch, heads, length), dtype=torch.float32)


@_attend_backward.register_fake
def _(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, documents, *settings = inputs
    ctx.save_for_backward(q, k, v, *output, documents)
    ctx.settings = settings


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Any, ...]:
    *tensors, documents = ctx.saved_tensors
    gradients = _attend_backward(gradient, *tensors, documents, *ctx.settings)
    return (*gradients, None, *(None for _ in ctx.settings))


_attend.register_autograd(_differentiate, setup_context=_keep)
