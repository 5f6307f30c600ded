"""A layer of experts, of which each token uses a few (Shazeer et al. 2017, arXiv 1701.06538).

Tokens are sorted by expert, so that each expert's are one run of rows, and all experts are one grouped matrix
product. No expert has a capacity: none of its tokens is dropped, and an expert without tokens costs nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.feed_forward import FeedForward
from models.layers.router import Router, Routing, Selection

__all__ = ["Experts", "MoE", "Router", "Routing", "Selection", "grouped_linear", "reorder"]


class Experts(nn.Module):
    """E feed-forward layers, w2(silu(w1 x) · w3 x) each, as stacked parameters: w1, w3 (E, F, D), w2 (E, D, F).

    How many experts there are and how wide they are is taken from the parameters at each call: a rank may hold
    some of the experts, or a part of each.
    """

    def __init__(self, n_experts: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(n_experts, hidden, dim))
        self.w2 = nn.Parameter(torch.empty(n_experts, dim, hidden))
        self.w3 = nn.Parameter(torch.empty(n_experts, hidden, dim))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Apply to each token its expert.

        Args:
            x: (M, D), sorted by expert.
            counts: (E,) int64, how many rows of x belong to each; they add up to M.

        Returns:
            (M, D).
        """
        ends = counts.cumsum(0).to(torch.int32)
        gated = F.silu(self.multiply(x, self.w1, ends)) * self.multiply(x, self.w3, ends)
        return self.multiply(gated, self.w2, ends)

    def multiply(self, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """`grouped_linear`. A method, so that the pipeline can exchange it to defer the weights' gradients."""
        return grouped_linear(x, weight, ends)


class MoE(nn.Module):
    """Σ over a token's experts of weight · expert(x), and what all tokens share, if anything.

    Args:
        dim: features of a token.
        hidden: features within each expert.
        selection: how many experts, and how they are chosen.
        shared_hidden: features of the feed-forward layer that all tokens go through; 0: there is none.
    """

    def __init__(self, dim: int, hidden: int, selection: Selection, shared_hidden: int = 0) -> None:
        super().__init__()
        self.router = Router(dim, selection)
        self.experts = Experts(selection.n_experts, dim, hidden)
        self.shared_experts = FeedForward(dim, shared_hidden) if shared_hidden else None

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        tokens = x.flatten(0, 1)  # (N, D)
        routing = self.router(tokens, x.shape[0])
        y = self._routed(tokens, routing).view_as(x)
        return y if self.shared_experts is None else y + self.shared_experts(x)

    def _routed(self, tokens: Tensor, routing: Routing) -> Tensor:
        """(N, D) to the weighed sum of the outputs of each token's experts, (N, D)."""
        per_token = routing.experts.shape[1]
        # Of the N · K uses of an expert, token by token: which comes at each place once sorted by expert, and back.
        order = routing.experts.flatten().argsort(stable=True)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        y = self.experts(_Copies.apply(tokens, order, place, per_token), routing.counts)
        y = reorder(y, place, order).unflatten(0, (-1, per_token))  # (N, K, D)
        return torch.bmm(routing.weights.unsqueeze(1), y).squeeze(1)


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply runs of rows by a matrix each.

    Args:
        x: (M, I).
        weight: (E, O, I).
        ends: (E,) int32; the rows of matrix e are those from ends[e - 1] to ends[e].

    Returns:
        (M, O).
    """
    if has_grouped_kernel(x, *weight.shape[1:]):
        return F.grouped_mm(x, weight.transpose(-2, -1), offs=ends)
    return _linear_by_linear(x, weight, ends)


def grouped_weight_gradient(x: Tensor, gradient: Tensor, ends: Tensor) -> Tensor:
    """The gradient (E, O, I) of the weights of `grouped_linear`, from its input (M, I) and that of its output (M, O)."""
    gradient = gradient.contiguous()  # the kernel takes no expanded tensors
    if has_grouped_kernel(x, x.shape[-1], gradient.shape[-1]):
        return F.grouped_mm(gradient.t(), x, offs=ends)
    lengths = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.stack(
        [g.t() @ run for g, run in zip(gradient.split(lengths), x.split(lengths), strict=True)]
    )


def has_grouped_kernel(x: Tensor, *widths: int) -> bool:
    """Whether torch multiplies tensors like x in one call: rows of these widths must be multiples of 16 bytes."""
    known = x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    if x.is_cuda or torch.compiler.is_compiling():
        known = x.dtype == torch.bfloat16  # accelerators and the compiler have no other
    return known and all(width * x.element_size() % 16 == 0 for width in widths)


def reorder(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """x[order], where `inverse` undoes `order`: the gradient is put back in order without additions into memory."""
    return _Reordered.apply(x, order, inverse)


@torch.compiler.disable
def _linear_by_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`grouped_linear` one matrix at a time. Not compiled: sizes are other ones each time."""
    runs = x.split(ends.diff(prepend=ends.new_zeros(1)).tolist())
    return torch.cat([F.linear(run, matrix) for run, matrix in zip(runs, weight.unbind(), strict=True)])


class _Copies(torch.autograd.Function):
    """Each token once for each of its experts, sorted by expert.

    As one function, since a token's gradient is then the sum over its K copies, without additions into memory in
    an order that changes from run to run.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, place: Tensor, per_token: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.per_token = per_token
        return tokens[order // per_token]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        (place,) = ctx.saved_tensors
        return gradient[place].unflatten(0, (-1, ctx.per_token)).sum(1), None, None, None


class _Reordered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        (inverse,) = ctx.saved_tensors
        return gradient[inverse], None, None
