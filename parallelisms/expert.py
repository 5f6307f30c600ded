"""Expert parallelism: the experts of a layer are spread over ranks, and tokens travel to them and back.

Lepikhin et al. 2020, GShard (arXiv 2006.16668), section 3, without its capacities: no token is dropped, however many
an expert gets. The ranks of an expert group work on different tokens; each has the experts that follow one another
from `rank · E / n`. In place of the forward of `models.layers.moe.Experts`:

    rows sorted by expert ─ exchange ─► rows from all ranks for this rank's experts ─ sort by expert ─ experts ─
    sort by rank ─ exchange ─► rows in the order in which they came

How many rows go where is exchanged before them. The gradient of an expert's weights is summed over the tokens of the
whole group by the way back of the rows; so data parallelism has it to sum over the other groups only. All ranks of a
group take part in every exchange, those that no row comes to as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Torch's own functional collectives: out of place, and known to the compiler. They need this import.
from torch.distributed import _functional_collectives as _  # noqa: F401
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

from models.layers.moe import Experts, reorder
from parallelisms.layout import EXPERT, TENSOR
from parallelisms.parts import Rows, find_parts

_ops = torch.ops._c10d_functional


def apply_expert_parallelism(module: nn.Module, mesh: DeviceMesh) -> None:
    """Spread the experts of every layer of a stage's module, on the meta device, in place.

    To be applied after tensor parallelism, whose cut of each expert it keeps.

    Args:
        module: the model, or a stage of it.
        mesh: (..., expert, tensor), see `parallelisms.mesh.Meshes`. The number of experts is a multiple of the
            expert dimension.
    """
    group = mesh[EXPERT].get_group()
    for experts in experts_of(module):
        _spread_parameters(experts, mesh)
        experts.forward = _SpreadExperts(  # type: ignore[method-assign]
            experts.forward, group.group_name, group.size()
        )


def experts_of(module: nn.Module) -> Iterator[Experts]:
    """The experts of each layer that has any."""
    return (child for child in module.modules() if isinstance(child, Experts))


def _spread_parameters(experts: Experts, mesh: DeviceMesh) -> None:
    """Make the parameters DTensors over the expert and, where they are cut by it, the tensor dimension."""
    whole: dict[str, Rows | None] = {}
    for name, parameter in experts._parameters.items():
        assert parameter is not None
        if isinstance(parameter, DTensor):  # tensor parallelism has been here
            spread = _cut_further(parameter, mesh)
        else:
            spread = distribute_tensor(parameter.detach(), mesh[EXPERT], [Shard(0)], src_data_rank=None)
            whole[name] = None
        experts._parameters[name] = nn.Parameter(spread, requires_grad=parameter.requires_grad)
    if whole:
        find_parts(experts, whole)


def _cut_further(parameter: DTensor, mesh: DeviceMesh) -> DTensor:
    """A parameter that is cut over tensor ranks, cut by experts too."""
    (placement,) = parameter.placements
    placements: list[Placement] = [Shard(0), placement]
    whole = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    return distribute_tensor(whole, mesh[EXPERT, TENSOR], placements, src_data_rank=None)


class _SpreadExperts:
    """The forward of experts that are spread over `ranks` ranks; `forward` is that of this rank's own."""

    def __init__(self, forward: Callable[[Tensor, Tensor], Tensor], group: str, ranks: int) -> None:
        self._forward = forward
        self._group = group
        self._ranks = ranks

    def __call__(self, x: Tensor, counts: Tensor) -> Tensor:
        """(M, D), sorted by expert, to (M, D); `counts` (E,) are this rank's rows for each expert of the group."""
        return self._compute(x, counts)

    @torch.compiler.disable
    def _compute(self, x: Tensor, counts: Tensor) -> Tensor:
        """Not compiled: sizes are other ones each time, and the host has to know them."""
        route = self._route(counts)
        rows = _Exchange.apply(x, route.sent, route.received, self._group)
        y = self._forward(reorder(rows, route.by_expert, route.by_rank), route.counts)
        return _Exchange.apply(
            reorder(y, route.by_rank, route.by_expert), route.received, route.sent, self._group
        )

    def _route(self, counts: Tensor) -> _Route:
        sent = counts.unflatten(0, (self._ranks, -1))  # (ranks, E / n), to each rank for each of its experts
        each = [sent.shape[1]] * self._ranks
        received = _exchanged(counts, each, each, self._group).view_as(
            sent
        )  # from each rank for each of ours
        totals = torch.stack((sent.sum(1), received.sum(1))).tolist()
        # Rows come in order of rank and, of each rank, of expert.
        experts = torch.arange(received.shape[1], device=counts.device).repeat(self._ranks)
        of_row = experts.repeat_interleave(received.flatten(), output_size=sum(totals[1]))
        by_expert = of_row.argsort(stable=True)
        by_rank = torch.empty_like(by_expert).scatter_(
            0, by_expert, torch.arange(len(of_row), device=counts.device)
        )
        return _Route(totals[0], totals[1], received.sum(0), by_expert, by_rank)


@dataclass(frozen=True)
class _Route:
    """Where the rows of one microbatch go.

    Attributes:
        sent: rows to each rank.
        received: rows from each rank (R in all).
        counts: (E / n,), rows for each of this rank's experts.
        by_expert: (R,), which of the rows that are received comes at each place, sorted by expert.
        by_rank: (R,), the other way round.
    """

    sent: list[int]
    received: list[int]
    counts: Tensor
    by_expert: Tensor
    by_rank: Tensor


class _Exchange(torch.autograd.Function):
    """Rows to all ranks of a group and from them; the gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchanged(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(gradients[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _exchanged(x: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
    """x (M, ...), cut into `sent` rows for each rank, to `received` rows from each."""
    exchanged: Tensor = _ops.wait_tensor(_ops.all_to_all_single(x.contiguous(), received, sent, group))
    return exchanged
