"""Output layer and cross-entropy in one: the logits of a few tokens at a time, and never those of all.

Logits and their gradient are the largest tensors of a training step, and are needed for a moment only. Here they are
made for a chunk of tokens, and with them at once the loss, the gradient of the hidden states and a share of the
weight's gradient (Hsu et al. 2024, Liger Kernel, arXiv 2410.10989, section 3.2; their kernel is not used). The matrix
products are the same three as those of the plain loss, but all of them belong to the forward.

A pipeline may run several forwards before it runs their backwards. Their weight gradients are added up in one place,
which the next backward empties into the parameter's: as many of them are alive as with one microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from parallelisms.collectives import Group
from parallelisms.softmax import Softmax


class WeightGradient:
    """The weight's gradient by all microbatches whose forwards have run and that no backward has handed on yet."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None

    def add(self, logits_gradient: Tensor, h: Tensor) -> None:
        """Add logits_gradient (N, V) transposed times h (N, D). Sums are kept in fp32."""
        if self._sum is None:
            self._sum = (logits_gradient.t() @ h).float()
        elif h.dtype == torch.float32:
            self._sum.addmm_(logits_gradient.t(), h)
        else:
            self._sum.add_(logits_gradient.t() @ h)

    def take(self) -> Tensor | None:
        """All that was added since this was called last, (V, D); None: nothing."""
        taken, self._sum = self._sum, None
        return taken


@runtime_checkable
class LossOfHidden(Protocol):
    """A loss that can be computed from hidden states (B, T, D) and the output's matrix (V, D)."""

    def of_hidden(
        self, h: Tensor, weight: Tensor, microbatch: int, accumulated: WeightGradient, chunk: int
    ) -> Tensor: ...


class FusedOutput:
    """An output layer whose forward is exchanged: while a loss is asked for, it gives that and not the logits.

    Inside the module's forward, since FSDP has the output's matrix gathered there and not afterwards.
    """

    def __init__(self, output: nn.Module, chunk: int) -> None:
        """`chunk` is how many tokens' logits there are at a time."""
        self._output = output
        self._plain = output.forward
        self._chunk = chunk
        self._accumulated = WeightGradient()
        self._asked: tuple[LossOfHidden, int] | None = None
        output.forward = self._forward

    @contextmanager
    def giving(self, loss: LossOfHidden, microbatch: int) -> Iterator[None]:
        """While open, the output layer gives this loss."""
        self._asked = loss, microbatch
        try:
            yield
        finally:
            self._asked = None

    def forget(self) -> None:
        """Let go of gradients that no backward will ask for."""
        self._accumulated.take()

    def _forward(self, h: Tensor) -> Tensor:
        if self._asked is None:
            logits: Tensor = self._plain(h)
            return logits
        loss, microbatch = self._asked
        weight = self._output.weight
        assert isinstance(weight, Tensor)
        return loss.of_hidden(h, weight, microbatch, self._accumulated, self._chunk)


def fused_cross_entropy(
    h: Tensor,
    weight: Tensor,
    labels: Tensor,
    factors: Tensor,
    vocabulary: Group | None,
    accumulated: WeightGradient,
    chunk: int,
) -> Tensor:
    """The sum of factors times the cross-entropies of the logits h weightᵀ, in fp32.

    It is the end of what is differentiated: its own gradient is taken to be 1.

    Args:
        h: (..., D).
        weight: (V, D), or this rank's part of the vocabulary.
        labels: (...), indices into the whole vocabulary; any number where the factor is 0.
        factors: (...), fp32.
        vocabulary: the ranks among which the vocabulary is divided, if it is.
        accumulated: where the weight's gradient is added up.
        chunk: how many tokens' logits there are at a time, at most.
    """
    differentiated = torch.is_grad_enabled() and (h.requires_grad or weight.requires_grad)
    total: Tensor = _Fused.apply(
        h,
        weight,
        labels.flatten(),
        factors.flatten(),
        vocabulary,
        accumulated if differentiated else None,
        chunk,
    )
    return total


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        weight: Tensor,
        labels: Tensor,
        factors: Tensor,
        vocabulary: Group | None,
        accumulated: WeightGradient | None,
        chunk: int,
    ) -> Tensor:
        tokens = h.flatten(0, -2)
        gradient = None if accumulated is None else torch.empty_like(tokens)
        total = torch.zeros((), dtype=torch.float32, device=h.device)
        chunks = max(1, -(-len(tokens) // chunk))
        for part in range(chunks):
            rows = slice(part * len(tokens) // chunks, (part + 1) * len(tokens) // chunks)
            # Always our own memory, which the softmax takes over.
            logits = (tokens[rows] @ weight.t()).float()
            softmax = Softmax.of(logits, labels[rows], vocabulary)
            counts = factors[rows] != 0
            total += (softmax.cross_entropies * factors[rows]).masked_fill(~counts, 0).sum()
            if accumulated is not None and gradient is not None:
                of_logits = softmax.gradient_in_place(factors[rows]).to(h.dtype)
                torch.mm(of_logits, weight, out=gradient[rows])
                accumulated.add(of_logits, tokens[rows])
        if gradient is not None:
            ctx.save_for_backward(gradient.view_as(h))
            ctx.accumulated = accumulated
        return total

    @staticmethod
    def backward(ctx: Any, *_gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        of_weight = ctx.accumulated.take()
        if of_weight is not None:
            of_weight = of_weight.to(gradient.dtype)
        return gradient, of_weight, None, None, None, None, None
