"""Do the ranks that should hold the same parameters and optimizer state hold the same?

They compute the same from the same, so they should, bit for bit: replicas of data parallelism, what tensor-parallel
ranks do not divide, the copies of a tied matrix. Where memory or a link gives wrong bits on one of them, the loss
does not show it for long. Each rank makes one number of each tensor, on its device; the numbers are compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parallelisms.pipeline.tied import TiedEmbedding
from trainer.checkpoint.agreement import Ranks
from trainer.checkpoint.names import full_name
from trainer.errors import ExitCode, StagelineError

_COLUMNS = 1024
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
_SHOWN = 3


class ReplicasDiffer(StagelineError):
    """Ranks that should hold the same do not."""

    exit_code = ExitCode.RANK_FAILED


@dataclass(frozen=True)
class _Held:
    """A tensor of this rank, and what it is part of."""

    name: str
    tensor: Tensor
    placed_as: Tensor  # with its placements on the mesh


def check_replicas(
    parts: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    tied: TiedEmbedding | None,
    device: torch.device,
) -> None:
    """Collective over all ranks.

    Raises:
        ReplicasDiffer: on all ranks, with the ranks and the tensors that differ.
    """
    held = [each for part in parts for each in _held(part, optimizer)]
    problems = _differences_of_replicas(held, device)
    matrices = [] if tied is None else [_of_parameter("", matrix, optimizer) for matrix in tied.matrices]
    own = [[int(checksum(each.tensor)) for each in tensors] for tensors in matrices]
    gathered = Ranks().gather((problems, None if tied is None else tied.peer, own))
    found = list(dict.fromkeys(problem for problems, _, _ in gathered for problem in problems))
    for rank, (_, peer, copies) in enumerate(gathered):
        others = copies[1:] if peer is None else gathered[peer][2]
        if copies and others != copies[:1] and (peer is None or rank < peer):
            where = f"rank {rank}" if peer is None else f"ranks {rank} and {peer}"
            found.append(f"the two copies of the tied embedding on {where} differ")
    if found:
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise ReplicasDiffer(f"found that what should be the same is not: {'; '.join(found[:_SHOWN])}{more}")


def checksum(tensor: Tensor) -> Tensor:
    """A number, int64 (), of all bits of a tensor, made where the tensor is. Not against malice.

    A sum modulo 2^64 with odd weights: any one element that differs changes it.
    """
    bits = tensor.detach().contiguous().view(_BITS[tensor.element_size()]).reshape(-1)
    weights = 2 * torch.arange(_COLUMNS, device=bits.device) + 1
    whole = len(bits) // _COLUMNS * _COLUMNS
    rest = bits[whole:].long()
    columns = bits[:whole].view(-1, _COLUMNS).sum(0, dtype=torch.int64)
    return (columns * weights).sum() + (rest * weights[: len(rest)]).sum()


def _held(part: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[_Held]:
    for name, parameter in part.named_parameters():
        yield from _of_parameter(full_name(name), parameter, optimizer)


def _of_parameter(name: str, parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> list[_Held]:
    """A parameter and its optimizer state, in an order that is the same on all ranks."""
    held = [_Held(name, _local(parameter), parameter)]
    for quantity, value in sorted(optimizer.state.get(parameter, {}).items()):
        placed_as = value if isinstance(value, DTensor) else parameter
        held.append(_Held(f"{quantity} of {name}", _local(value), placed_as))
    return held


def _local(tensor: Tensor) -> Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    inner: Tensor = getattr(
        local, "_tensor", local
    )  # of torchao's weights, which are cast when they are gathered
    return inner


def _differences_of_replicas(held: Sequence[_Held], device: torch.device) -> list[str]:
    """Along each dimension of a mesh, the tensors that are whole on all its ranks."""
    along: dict[tuple[DeviceMesh, int], list[_Held]] = {}
    for each in held:
        if isinstance(each.placed_as, DTensor):
            mesh = each.placed_as.device_mesh
            for dimension, placement in enumerate(each.placed_as.placements):
                if placement.is_replicate() and mesh.size(dimension) > 1:
                    along.setdefault((mesh, dimension), []).append(each)
    found: list[str] = []
    for (mesh, dimension), tensors in along.items():
        group = mesh.get_group(dimension)
        own = torch.stack([checksum(each.tensor).to(device) for each in tensors])
        rows = [torch.empty_like(own) for _ in range(mesh.size(dimension))]
        dist.all_gather(rows, own, group=group)
        table = torch.stack(rows)
        if bool((table == table[0]).all()):
            continue
        ranks = dist.get_process_group_ranks(group)
        found += [
            f"{each.name} {_who(column, ranks)}"
            for each, column in zip(tensors, table.T.tolist(), strict=True)
            if len(set(column)) > 1
        ]
    return found


def _who(values: Sequence[int], ranks: Sequence[int]) -> str:
    """The ranks that differ from most, or, where there is no most, all of them."""
    usual, count = Counter(values).most_common(1)[0]
    if 2 * count <= len(values):
        return f"differs among the ranks {', '.join(map(str, ranks))}"
    odd = [rank for rank, value in zip(ranks, values, strict=True) if value != usual]
    others = [rank for rank in ranks if rank not in odd]
    return f"on rank {', '.join(map(str, odd))} is not that of the ranks {', '.join(map(str, others))}"
