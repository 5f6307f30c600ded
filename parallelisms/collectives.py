"""Collectives along a dimension of tensors, with their gradients; the compiler can follow all of them.

`group` is a process group and its number of ranks. A gradient that arrives at a rank is that of its own part of the
computation: where ranks work on different parts of what they gathered, its gradient is the sum over them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Torch's own functional collectives: out of place, and known to the compiler. They need this import.
from torch.distributed import _functional_collectives as _  # noqa: F401
from torch.distributed.device_mesh import DeviceMesh

_ops = torch.ops._c10d_functional


@dataclass(frozen=True)
class Group:
    """A process group by its name, as the compiler wants it, with its size and this rank's place in it."""

    name: str
    size: int
    rank: int

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Group:
        """The group of a mesh of one dimension."""
        return cls(mesh.get_group().group_name, mesh.size(), mesh.get_local_rank())


def gather(x: Tensor, dim: int, group: Group) -> Tensor:
    """The parts of all ranks, in order of rank along `dim`. The gradient is summed over ranks, and each gets its part."""
    gathered: Tensor = _Gather.apply(x, dim, group)
    return gathered


def scatter_sum(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's part along `dim` of the sum over all ranks. The gradient is gathered."""
    part: Tensor = _ScatterSum.apply(x, dim, group)
    return part


def gather_same(x: Tensor, dim: int, group: Group) -> Tensor:
    """As `gather`, for ranks that all compute the same from it: the gradient is this rank's part of any one of them."""
    gathered: Tensor = _GatherSame.apply(x, dim, group)
    return gathered


def all_gathered(x: Tensor, dim: int, group: Group) -> Tensor:
    """The parts of all ranks along `dim`; has no gradient."""
    gathered = _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), group.size, group.name))
    if dim == 0:
        return gathered
    return torch.cat(gathered.chunk(group.size), dim)


def summed_part(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's part along `dim` of the sum over all ranks; has no gradient."""
    if dim != 0:
        x = torch.cat(x.chunk(group.size, dim))
    part: Tensor = _ops.wait_tensor(_ops.reduce_scatter_tensor(x.contiguous(), "sum", group.size, group.name))
    return part


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gathered(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return summed_part(gradients[0], ctx.dim, ctx.group), None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return summed_part(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return all_gathered(gradients[0], ctx.dim, ctx.group), None, None


class _GatherSame(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gathered(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0].chunk(ctx.group.size, ctx.dim)[ctx.group.rank], None, None
