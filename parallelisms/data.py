"""Data parallelism with FSDP2: shard, replicate, or both (HSDP), and when a stage's gradients are reduced.

Gradients are summed, never averaged: the loss is divided by the number of counted tokens of the whole
global batch beforehand, so the sum over ranks is the gradient of the global mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from parallelisms.expert import experts_of


@dataclass(frozen=True)
class Precision:
    """Data types of parameters in compute and of the gradient reduction."""

    parameters: torch.dtype = torch.float32
    reduction: torch.dtype = torch.float32


def shard_data_parallel(
    module: nn.Module,
    mesh: DeviceMesh,
    precision: Precision,
    *,
    reshard_after_forward: bool,
    reshard_always: bool = False,
    cpu_offload: bool = False,
    experts_mesh: DeviceMesh | None = None,
) -> ShardedStage:
    """Apply FSDP2 to each of `module.layers` and to the module itself.

    `mesh` has one dimension (shard) or two (replicate, shard). A pipeline keeps parameters gathered between
    forward and backward (`reshard_after_forward=False`): gathering them again for every microbatch would
    cost more than it saves. `reshard_always` releases them after every forward and backward nevertheless. With
    expert parallelism the experts of a layer are sharded over `experts_mesh`, of two dimensions as well.
    """
    policy = MixedPrecisionPolicy(param_dtype=precision.parameters, reduce_dtype=precision.reduction)
    pinned = mesh.device_type != "cpu"  # there is no other memory to copy to
    offload = CPUOffloadPolicy(pin_memory=pinned) if cpu_offload else OffloadPolicy()
    shard = partial(fully_shard, mesh=mesh, mp_policy=policy, offload_policy=offload)
    layers: list[Any] = list(module.layers.values())  # type: ignore[operator]
    place = None if experts_mesh is None else _ExpertsElsewhere(module, experts_mesh)
    for position, layer in enumerate(layers):
        # The last layer is needed again at once, unless other forwards come before its backward.
        reshard = reshard_always or (reshard_after_forward and position < len(layers) - 1)
        shard(layer, reshard_after_forward=reshard, shard_placement_fn=place)
    shard(module, reshard_after_forward=reshard_after_forward or reshard_always)
    if experts_mesh is not None and reshard_after_forward:
        # The host waits for the counts of the rows that travel, so it does not run ahead of the device by itself.
        for layer, following in pairwise(layers):
            layer.set_modules_to_forward_prefetch([following])
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.set_gradient_divide_factor(1.0)
            child.set_force_sum_reduction_for_comms(True)
    assert isinstance(module, FSDPModule)
    return ShardedStage(module, reshard_always=reshard_always)


class _ExpertsElsewhere:
    """Says where FSDP places each parameter of a layer: those of spread experts over a mesh of their own."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        # Torch's public interface has no name for the mesh of a single parameter.
        from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

        self._mesh = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
        self._experts = {id(each) for experts in experts_of(module) for each in experts._parameters.values()}

    def __call__(self, parameter: nn.Parameter) -> Any:
        from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult

        if id(parameter) not in self._experts:
            return None
        return ShardPlacementResult(self._cut(parameter), self._mesh)

    def _cut(self, parameter: nn.Parameter) -> Shard:
        """By expert where that gives all ranks equally many; else along a dimension that is not cut yet."""
        assert isinstance(parameter, DTensor)
        ranks = self._mesh.shard_mesh_size
        if parameter.to_local().shape[0] % ranks == 0:
            return Shard(0)
        free = {1, 2} - {each.dim for each in parameter.placements if isinstance(each, Shard)}
        return Shard(max(free, key=lambda dim: (parameter.shape[dim] % ranks == 0, dim)))


def _parameter_groups(module: FSDPModule) -> list[Any]:
    """What FSDP gathers and reduces together of a module; one group in torch before 2.12, or none."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []


class ShardedStage:
    """The collective half of one FSDP2 stage: gather, release, reduce, as the schedule says."""

    def __init__(self, module: FSDPModule, *, reshard_always: bool = False) -> None:
        self._module = module
        self._reshard_always = reshard_always

    def unshard(self) -> None:
        """Start to gather all parameters of the stage; their first use waits for them."""
        for child in self._fsdp_modules():
            child.unshard(async_op=True)

    def reshard(self) -> None:
        """Release the gathered parameters."""
        for child in self._fsdp_modules():
            child.reshard()

    def set_last_backward(self, last: bool) -> None:
        """Whether the next backward completes the gradients of this step: only then are they reduced.

        Before that, gradients stay whole (in the reduction's data type), with the parameters unless those are
        always released.
        """
        self._module.set_is_last_backward(last)
        self._module.set_requires_gradient_sync(last)
        self._module.set_reshard_after_backward(last or self._reshard_always)

    def accumulate(self) -> None:
        """Move weight gradients that were computed outside autograd to where FSDP accumulates them."""
        for child in self._fsdp_modules():
            for group in _parameter_groups(child):
                for parameter in group.fsdp_params:
                    parameter.accumulate_unsharded_grad_if_needed()
                    parameter.to_accumulated_grad_if_needed()

    def reduce_gradients(self) -> None:
        """Reduce all accumulated gradients of the stage, when no backward with `last=True` did it."""
        self.set_last_backward(True)
        # FSDP's own end of backward: reduces every group that has not been, then waits for the reductions.
        self._module._get_fsdp_state()._root_post_backward_final_callback()

    def _fsdp_modules(self) -> list[FSDPModule]:
        return [child for child in self._module.modules() if isinstance(child, FSDPModule)]  # type: ignore[attr-defined]
