"""Weight gradients computed later: what makes BACKWARD_INPUT and BACKWARD_WEIGHT separate.

A linear layer's backward is two independent products: the gradient of its input, which the stage before
waits for, and the gradient of its weight, which nobody waits for (Qi et al. 2024, arXiv 2401.10241,
section 2). `defer_weight_gradients` replaces the forward of every linear layer of a stage (an output that is tied
to the embedding is one, and the grouped products of experts are) by one whose backward computes the first at once
and, while `WeightGradients.deferring` is on, puts the operands of the second aside. Embeddings and norms, whose
weight gradients are cheap, stay with the input's part.

The operands are kept per use and not per module, so a module used several times in a stage is counted
several times; under activation checkpointing they come from the one recomputation that the input's part
makes, so the weight's part recomputes nothing. Compiled layers compute both gradients with the input's part:
correct, but then there is no weight's part that could fill a bubble.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.moe import Experts, grouped_linear, grouped_weight_gradient
from models.layers.tied import TiedOutput


@dataclass(frozen=True)
class _Operands:
    """One pending product: gradient of `weight` += output_gradient (N, O) transposed times input (N, I).

    `weight` and `bias` are what the layer computed with: parameters, or parts of them that autograd leads back to
    them (tensor parallelism).
    """

    weight: Tensor
    bias: Tensor | None
    input: Tensor
    output_gradient: Tensor

    def accumulate(self) -> None:
        with torch.no_grad():
            gradient = self.output_gradient.flatten(0, -2)
            inputs = self.input.flatten(0, -2)
            if self.weight.is_leaf and self.weight.grad is not None:
                self.weight.grad.addmm_(gradient.t(), inputs)
            else:
                _add(self.weight, gradient.t() @ inputs)
            if self.bias is not None:
                _add(self.bias, gradient.sum(0))


def _add(weight: Tensor, gradient: Tensor) -> None:
    """Add to the gradient of a parameter, or of the parameter that this is a part of."""
    if not weight.is_leaf:
        torch.autograd.backward((weight,), (gradient,), retain_graph=True)
    elif weight.grad is None:
        weight.grad = gradient
    else:
        weight.grad.add_(gradient)


@dataclass(frozen=True)
class _GroupedOperands:
    """The same of stacked weights (E, O, I), of which each has a run of the rows of input (M, I) and output (M, O)."""

    weight: Tensor
    input: Tensor
    output_gradient: Tensor
    ends: Tensor

    def accumulate(self) -> None:
        with torch.no_grad():
            _add(self.weight, grouped_weight_gradient(self.input, self.output_gradient, self.ends))


PendingGradients = list[_Operands | _GroupedOperands]


@dataclass
class WeightGradients:
    """Where the linear layers of one stage put what is left for later."""

    _pending: PendingGradients | None = field(default=None)

    @property
    def deferring(self) -> bool:
        return self._pending is not None

    @contextmanager
    def collect(self) -> Iterator[PendingGradients]:
        """While open, backward passes put their weight gradients' operands into the list that is yielded."""
        pending: PendingGradients = []
        self._pending = pending
        try:
            yield pending
        finally:
            self._pending = None

    def put(self, operands: _Operands | _GroupedOperands) -> None:
        assert self._pending is not None
        self._pending.append(operands)


def accumulate(pending: PendingGradients) -> None:
    """Compute the pending weight gradients, add them to `.grad`, and let go of their operands."""
    while pending:
        pending.pop().accumulate()


class _LinearWithDeferredWeight(torch.autograd.Function):
    """`F.linear` whose backward can leave the weight's gradient for later."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, store: WeightGradients) -> Tensor:
        ctx.save_for_backward(x, weight)
        # The parameters themselves: under checkpointing, saved tensors come back as detached copies.
        ctx.parameters = (weight, bias)
        ctx.store = store
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias, _ = ctx.needs_input_grad
        input_gradient = gradient @ weight if needs_input else None
        if not needs_weight:
            return input_gradient, None, None, None
        if ctx.store.deferring:
            parameter, bias = ctx.parameters
            ctx.store.put(_Operands(parameter, bias if needs_bias else None, x, gradient))
            return input_gradient, None, None, None
        rows = gradient.flatten(0, -2)
        weight_gradient = rows.t() @ x.flatten(0, -2)
        return input_gradient, weight_gradient, rows.sum(0) if needs_bias else None, None


class _GroupedLinearWithDeferredWeights(torch.autograd.Function):
    """`grouped_linear` whose backward can leave the weights' gradient for later."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, store: WeightGradients) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.weight = weight
        ctx.store = store
        return grouped_linear(x, weight, ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        gradient = gradients[0].contiguous()
        x, weight, ends = ctx.saved_tensors
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        input_gradient = grouped_linear(gradient, weight.transpose(-2, -1), ends) if needs_input else None
        if not needs_weight:
            return input_gradient, None, None, None
        if ctx.store.deferring:
            ctx.store.put(_GroupedOperands(ctx.weight, x, gradient, ends))
            return input_gradient, None, None, None
        return input_gradient, grouped_weight_gradient(x, gradient, ends), None, None


def defer_weight_gradients(module: nn.Module) -> WeightGradients:
    """Let every linear layer in `module`, and every layer of experts, be able to defer its weight gradient; returns
    the store they share.

    Without an open `collect()` the layers compute exactly what they did before.
    """
    store = WeightGradients()
    for child in module.modules():
        if isinstance(child, nn.Linear | TiedOutput):
            if isinstance(child, nn.Linear) and type(child).forward is not nn.Linear.forward:
                continue  # computes otherwise, in float8: it keeps its own backward
            child.forward = _deferring_forward(child, store)  # type: ignore[method-assign, assignment]
        elif isinstance(child, Experts):
            child.multiply = _deferring_multiply(store)  # type: ignore[method-assign, assignment]
    return store


def _deferring_forward(linear: nn.Linear | TiedOutput, store: WeightGradients) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        # The weight is looked up at each call: FSDP exchanges the parameter between sharded and gathered.
        # A compiled region has one backward graph with both gradients in it: they come with the input's part.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return _LinearWithDeferredWeight.apply(x, linear.weight, linear.bias, store)
        return F.linear(x, linear.weight, linear.bias)

    return forward


def _deferring_multiply(store: WeightGradients) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def multiply(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return _GroupedLinearWithDeferredWeights.apply(x, weight, ends, store)
        return grouped_linear(x, weight, ends)

    return multiply
