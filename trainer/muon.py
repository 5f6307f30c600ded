"""Muon for the hidden matrices, AdamW for everything else, as one optimizer.

Muon replaces the momentum of a matrix by the orthogonal matrix nearest to it, so that all its directions are learned
at the same rate (`trainer.orthogonal` has the sources). That is of hidden matrices only: embeddings and output are
look-ups, norms and biases are vectors, and they stay with AdamW. It keeps one number per parameter where AdamW keeps
two.

A matrix must be whole to be orthogonalised. Sharded ones come together on one rank each
(`parallelisms.whole_matrices`), so that the update is the same in every layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallelisms.whole_matrices import on_whole_matrices, part_of
from trainer.orthogonal import format_of_products, orthogonalized, scale


class Muon(torch.optim.Optimizer):
    """Groups with "momentum" are updated by Muon, the others are those of `others`.

    Args:
        groups: of hidden matrices (M, N) or stacks of them (E, M, N), each with "weight_decay".
        others: the optimizer of the other parameters. It shares its groups and its state with this one, so that
            both have one learning rate and one checkpoint.
        lr: learning rate of the matrices.
        momentum: decay rate of the running mean of the gradient; the update looks one step ahead (Nesterov).
        scaling: see `trainer.orthogonal.scale`.
        state_dtype: number format of the running mean.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        others: torch.optim.Optimizer | None,
        *,
        lr: float,
        momentum: float,
        scaling: str,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        own = [{**group, "lr": lr, "momentum": momentum} for group in groups]
        super().__init__([*own, *(others.param_groups if others is not None else ())], {})
        self._others = others
        self._scaling = scaling
        self._state_dtype = state_dtype
        if others is not None:
            self.state = others.state

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of all parameters that have gradients. Collective over the ranks that share a matrix."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            if "momentum" in group:
                self._update(group)
        if self._others is not None:
            self._others.step()
        return loss

    def _update(self, group: dict[str, Any]) -> None:
        parameters: list[nn.Parameter] = [each for each in group["params"] if each.grad is not None]
        parts = []
        for parameter in parameters:
            update = self._momentum(parameter, group["momentum"])
            parts.append(part_of(parameter, update.to(format_of_products(update.device))))
        updates = on_whole_matrices(parts, orthogonalized)
        for parameter, update in zip(parameters, updates, strict=True):
            local = _local(parameter)
            rows, columns = parameter.shape[-2:]
            local.mul_(1 - group["lr"] * group["weight_decay"])
            local.add_(update.to(local.dtype), alpha=-group["lr"] * scale(rows, columns, self._scaling))

    def _momentum(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        """Take the gradient into the running mean; returns the mean as it would be after the same gradient again."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, dtype=self._state_dtype)
        assert parameter.grad is not None
        buffer, gradient = _local(state["momentum_buffer"]), _local(parameter.grad)
        mean = buffer.to(gradient.dtype).lerp(gradient, 1 - momentum)
        buffer.copy_(mean)
        return gradient.lerp(mean, momentum)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
