"""Work on whole matrices that are cut over ranks: each comes together on one rank, and its result goes back.

Matrices are dealt out to the ranks of a group. One exchange takes every rank's part of each matrix to the rank that
it is dealt to, a second one brings the parts of the results back: a rank sends as much as it keeps, and each matrix
is worked on once, instead of by every rank after an all-gather. A matrix that is cut along several dimensions of the
mesh comes together along one after the other. Copies (replicas) each work on their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard

# What is exchanged at once: enough to fill a network, little beside the state.
_BUCKET_NUMBERS = 64 * 2**20


@dataclass(frozen=True)
class Cut:
    """How a matrix is divided along one dimension of the mesh: `sizes` of the parts along dimension `dim`, by rank
    of `group`."""

    dim: int
    sizes: tuple[int, ...]
    group: dist.ProcessGroup


@dataclass(frozen=True)
class Part:
    """A rank's part of a matrix, or of a stack of them, (..., M, N).

    Attributes:
        tensor: the part.
        cuts: in the order in which they are undone.
        numbers: of a rank's part on average: the same on all ranks.
    """

    tensor: Tensor
    cuts: tuple[Cut, ...]
    numbers: int


def on_whole_matrices(parts: Sequence[Part], function: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """`function` of every whole matrix, and this rank's parts of the results, in order.

    Collective over all groups in the parts' cuts: every rank calls it with the same matrices in the same order.
    """
    results: list[Tensor] = []
    for bucket in _buckets(parts):
        results += _carry_out(bucket, function)
    return results


def part_of(parameter: Tensor, local: Tensor) -> Part:
    """`local`, which lies like this rank's part of a parameter, and how the parameter's matrices are cut.

    A stack of matrices (E, M, N) that is cut between its matrices is not: each of them is whole.
    """
    if not isinstance(parameter, DTensor):
        return Part(local, (), local.numel())
    mesh, shape = parameter.device_mesh, list(parameter.shape)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    cuts: list[Cut] = []
    for index in _outermost_first(parameter.placements):
        dim: int = parameter.placements[index].dim  # type: ignore[attr-defined]
        sizes = _chunks(shape[dim], mesh.size(index))
        shape[dim] = sizes[coordinate[index]]
        if len(sizes) > 1 and dim >= len(shape) - 2:
            cuts.append(Cut(dim, sizes, mesh.get_group(index)))
    assert list(local.shape) == shape, f"a part of shape {tuple(local.shape)}, expected {shape}"
    return Part(local, tuple(reversed(cuts)), parameter.numel() // mesh.size())


def _outermost_first(placements: Sequence[Placement]) -> list[int]:
    """Mesh dimensions that cut, in the order in which they do: FSDP cuts what tensor parallelism has cut before it,
    though it stands further left; its placement is a strided one then."""
    cutting = [index for index, placement in enumerate(placements) if not placement.is_replicate()]
    return sorted(cutting, key=lambda index: type(placements[index]) is not Shard)


def _chunks(size: int, ranks: int) -> tuple[int, ...]:
    """As torch.chunk cuts: equal parts, rounded up, and what is left."""
    each = -(-size // ranks)
    return tuple(max(0, min(each, size - rank * each)) for rank in range(ranks))


def _buckets(parts: Sequence[Part]) -> list[list[Part]]:
    buckets: list[list[Part]] = [[]]
    filled = 0
    for part in parts:
        if buckets[-1] and filled + part.numbers > _BUCKET_NUMBERS:
            buckets.append([])
            filled = 0
        buckets[-1].append(part)
        filled += part.numbers
    return buckets


def _carry_out(parts: Sequence[Part], function: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Undo the first cut of those that have one, group by group, and go on with what this rank then has."""
    results: list[Tensor | None] = [None if part.cuts else function(part.tensor) for part in parts]
    by_group: dict[dist.ProcessGroup, list[int]] = {}
    for index, part in enumerate(parts):
        if part.cuts:
            by_group.setdefault(part.cuts[0].group, []).append(index)
    for group, indices in by_group.items():
        deal = _Deal([parts[index] for index in indices], group)
        owned = deal.bring_together()
        for index, result in zip(indices, deal.bring_back(_carry_out(owned, function)), strict=True):
            results[index] = result
    return [result for result in results if result is not None]


class _Deal:
    """Matrices dealt out to the ranks of a group, the largest first, so that all have about as much to do."""

    def __init__(self, parts: Sequence[Part], group: dist.ProcessGroup) -> None:
        self._parts = parts
        self._group = group
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        order = sorted(range(len(parts)), key=lambda index: -parts[index].numbers)
        self._of_rank = [order[rank :: self._ranks] for rank in range(self._ranks)]

    def bring_together(self) -> list[Part]:
        """The whole matrices that are dealt to this rank (along the first cut)."""
        sent = [[self._parts[index].tensor for index in mine] for mine in self._of_rank]
        shapes = [
            [self._shape(index, rank) for index in self._of_rank[self._rank]] for rank in range(self._ranks)
        ]
        received = self._exchange(sent, shapes)
        together = []
        for position, index in enumerate(self._of_rank[self._rank]):
            part = self._parts[index]
            whole = torch.cat([pieces[position] for pieces in received], dim=part.cuts[0].dim)
            together.append(replace(part, tensor=whole, cuts=part.cuts[1:]))
        return together

    def bring_back(self, results: Sequence[Tensor]) -> list[Tensor]:
        """This rank's part of every result, in the order of the parts."""
        mine = self._of_rank[self._rank]
        pieces = [
            result.split(self._parts[index].cuts[0].sizes, dim=self._parts[index].cuts[0].dim)
            for index, result in zip(mine, results, strict=True)
        ]
        sent = [[each[rank] for each in pieces] for rank in range(self._ranks)]
        shapes = [[self._parts[index].tensor.shape for index in owned] for owned in self._of_rank]
        back = self._exchange(sent, shapes)
        results_of = {
            index: tensor
            for owned, tensors in zip(self._of_rank, back, strict=True)
            for index, tensor in zip(owned, tensors, strict=True)
        }
        return [results_of[index] for index in range(len(self._parts))]

    def _shape(self, index: int, rank: int) -> torch.Size:
        """Of the part of a matrix that another rank has."""
        part = self._parts[index]
        shape = list(part.tensor.shape)
        shape[part.cuts[0].dim] = part.cuts[0].sizes[rank]
        return torch.Size(shape)

    def _exchange(
        self, sent: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[torch.Size]]
    ) -> list[list[Tensor]]:
        """Send `sent[r]` to rank r; returns what came from each rank, whose shapes are known."""
        example = self._parts[0].tensor
        flat = [tensor.flatten() for tensors in sent for tensor in tensors]
        outgoing = torch.cat(flat) if flat else example.new_empty(0)
        sizes = [sum(shape.numel() for shape in each) for each in shapes]
        incoming = example.new_empty(sum(sizes))
        dist.all_to_all_single(
            incoming,
            outgoing,
            sizes,
            [sum(tensor.numel() for tensor in tensors) for tensors in sent],
            group=self._group,
        )
        received = []
        for block, each in zip(incoming.split(sizes), shapes, strict=True):
            pieces = block.split([shape.numel() for shape in each])
            received.append([piece.view(shape) for piece, shape in zip(pieces, each, strict=True)])
        return received
