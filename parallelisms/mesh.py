"""The device meshes of a layout."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallelisms.layout import (
    CONTEXT,
    EXPERT,
    EXPERT_SHARD,
    FSDP,
    PIPELINE,
    REPLICATE,
    SHARD,
    TENSOR,
    Layout,
)


@dataclass(frozen=True)
class Meshes:
    """The same ranks, arranged for different purposes. A parameter's placements are all on one of these.

    Attributes:
        parameters: (pipeline, replicate, fsdp, tensor): over which ranks parameters are placed.
        data: (pipeline, replicate, shard, context, tensor): which ranks work on which part of the data; None
            where the context degree is 1.
        experts: (pipeline, replicate, expert_shard, expert, tensor): over which ranks the parameters of experts
            are placed; None where the expert degree is 1.
    """

    parameters: DeviceMesh
    data: DeviceMesh | None = None
    experts: DeviceMesh | None = None

    @cached_property
    def tensor(self) -> DeviceMesh:
        return self.parameters[TENSOR]

    @cached_property
    def context(self) -> DeviceMesh | None:
        return None if self.data is None else self.data[CONTEXT]


def build_meshes(layout: Layout, device_type: str) -> Meshes:
    """The meshes of all dimensions. Collective over all ranks; needs a process group."""
    pipeline, replicate, tensor = layout.pipeline, layout.replicate, layout.tensor
    parameters = init_device_mesh(
        device_type,
        (pipeline, replicate, layout.sharding_ranks, tensor),
        mesh_dim_names=(PIPELINE, REPLICATE, FSDP, TENSOR),
    )
    data = experts = None
    if layout.context > 1:
        data = init_device_mesh(
            device_type,
            tuple(degree for _, degree in layout.dimensions),
            mesh_dim_names=(PIPELINE, REPLICATE, SHARD, CONTEXT, TENSOR),
        )
    if layout.expert > 1:
        experts = init_device_mesh(
            device_type,
            (pipeline, replicate, layout.sharding_ranks // layout.expert, layout.expert, tensor),
            mesh_dim_names=(PIPELINE, REPLICATE, EXPERT_SHARD, EXPERT, TENSOR),
        )
    return Meshes(parameters, data, experts)
