"""One pipeline stage at run time: forward and backward of one microbatch, and what is held in between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from models.layers.sequences import Sequences
from parallelisms.data import ShardedStage
from parallelisms.fused_loss import FusedOutput, LossOfHidden
from parallelisms.pipeline.deferred import (
    PendingGradients,
    WeightGradients,
    accumulate,
    defer_weight_gradients,
)

# Loss of the last stage's output (B, T, V) for a microbatch: a scalar, already divided by the counted tokens
# of the global batch, so that the sum over microbatches, steps and ranks is the global mean.
LossFunction = Callable[[Tensor, int], Tensor]


@dataclass
class _Held:
    """What one microbatch keeps alive between its forward and the end of its backward."""

    input: Tensor
    output: GradientEdge  # not the tensor: the output's memory is free once it is sent
    pending: PendingGradients = field(default_factory=list)


class Stage:
    """A stage's module with its microbatches in flight."""

    def __init__(
        self,
        index: int,
        module: nn.Module,
        *,
        last: bool,
        split_backward: bool,
        sharding: ShardedStage | None = None,
        loss_chunk: int | None = None,
    ) -> None:
        """`loss_chunk`: the last stage computes the loss from the logits of so many tokens at a time. Its loss
        function must then be a `LossOfHidden`. None: from all logits at once."""
        self.index = index
        self.module = module
        self.sharding = sharding
        self.is_first = index == 0
        self.is_last = last
        self._deferred: WeightGradients | None = defer_weight_gradients(module) if split_backward else None
        self._fused: FusedOutput | None = None
        if last and loss_chunk is not None:
            self._fused = FusedOutput(module.output, loss_chunk)  # type: ignore[arg-type]
        self._held: dict[int, _Held] = {}

    @property
    def microbatches_held(self) -> int:
        """How many microbatches hold activations (or operands of weight gradients) now."""
        return len(self._held)

    def forward(
        self, microbatch: int, x: Tensor, loss: LossFunction | None, sequences: Sequences | None = None
    ) -> Tensor:
        """Output for the next stage (B, T, D), or on the last stage the loss; detached either way.

        `sequences` says where the tokens stand; None: one after the other from position 0.
        """
        if not self.is_first:
            x.requires_grad_(torch.is_grad_enabled())
        if loss is None or not self.is_last:
            output = self.module(x, sequences)
        elif self._fused is None:
            output = loss(self.module(x, sequences), microbatch)
        else:
            assert isinstance(loss, LossOfHidden)
            with self._fused.giving(loss, microbatch):
                output = self.module(x, sequences)
        if torch.is_grad_enabled():
            self._held[microbatch] = _Held(x, get_gradient_edge(output))
        return output.detach()

    def backward(self, microbatch: int, output_gradient: Tensor | None) -> Tensor | None:
        """All gradients; returns the input's (B, T, D), None on the first stage."""
        held = self._held.pop(microbatch)
        self._run_backward(held, output_gradient)
        return held.input.grad

    def backward_input(self, microbatch: int, output_gradient: Tensor | None) -> Tensor | None:
        """The input's gradient; those of the weights are left for `backward_weight`."""
        assert self._deferred is not None, "the stage was built without split_backward"
        held = self._held[microbatch]
        with self._deferred.collect() as held.pending:
            self._run_backward(held, output_gradient)
        gradient = held.input.grad
        del held.input, held.output
        return gradient

    def backward_weight(self, microbatch: int) -> None:
        """The weights' gradients that `backward_input` left."""
        accumulate(self._held.pop(microbatch).pending)
        if self.sharding is not None:
            self.sharding.accumulate()

    def forget(self) -> None:
        """Let go of everything in flight, after a step that was not completed."""
        self._held.clear()
        if self._fused is not None:
            self._fused.forget()

    def _run_backward(self, held: _Held, output_gradient: Tensor | None) -> None:
        gradient = (
            held.input.new_ones((), dtype=torch.float32) if output_gradient is None else output_gradient
        )
        torch.autograd.backward((held.output,), (gradient,))
