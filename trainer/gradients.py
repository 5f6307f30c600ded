"""Norm and clipping of the gradients of the whole model, whatever ranks its parts are on."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def local_norm_squared(parameters: Iterable[nn.Parameter], device: torch.device) -> Tensor:
    """This rank's share of the squared norm, in fp64: the sum over all ranks is the whole model's.

    An element that several ranks hold (replicas) is counted in equal parts by each of them.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    by_copies: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_copies.setdefault(_copies(parameter.grad), []).append(_local(parameter.grad))
    for copies, gradients in by_copies.items():
        norms = torch.stack(
            [norm.double() for norm in torch._foreach_norm(gradients, 2, dtype=torch.float32)]
        )
        total += (norms.square().sum() / copies).to(device)
    return total


def clip(parameters: Iterable[nn.Parameter], norm: float, max_norm: float) -> None:
    """Scale all gradients by max_norm / norm if `norm`, that of the whole model, is larger. 0: never."""
    if max_norm <= 0 or norm <= max_norm:
        return
    gradients = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, max_norm / norm)


def _copies(gradient: Tensor) -> int:
    if not isinstance(gradient, DTensor):
        return 1
    mesh = gradient.device_mesh
    return math.prod(
        mesh.size(i) for i, placement in enumerate(gradient.placements) if placement.is_replicate()
    )


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
