"""Data parallelism with FSDP2: shard, replicate, or both (HSDP), and when a stage's gradients are reduced.

Gradients are summed, never averaged: the loss is divided by the number of counted tokens of the whole
global batch beforehand, so the sum over ranks is the gradient of the global mean.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    cpu_offload: bool = False,
) -> ShardedStage:
    """Apply FSDP2 to each of `module.layers` and to the module itself.

    `mesh` has one dimension (shard) or two (replicate, shard). A pipeline keeps parameters gathered between
    forward and backward (`reshard_after_forward=False`): gathering them again for every microbatch would
    cost more than it saves.
    """
    policy = MixedPrecisionPolicy(param_dtype=precision.parameters, reduce_dtype=precision.reduction)
    offload = CPUOffloadPolicy() if cpu_offload else OffloadPolicy()
    layers = list(module.layers.values())  # type: ignore[operator]
    for position, layer in enumerate(layers):
        # The last layer is needed again at once by the backward that follows.
        reshard = reshard_after_forward and position < len(layers) - 1
        fully_shard(layer, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=reshard)
    fully_shard(
        module,
        mesh=mesh,
        mp_policy=policy,
        offload_policy=offload,
        reshard_after_forward=reshard_after_forward,
    )
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.set_gradient_divide_factor(1.0)
            child.set_force_sum_reduction_for_comms(True)
    assert isinstance(module, FSDPModule)
    return ShardedStage(module)


class ShardedStage:
    """The collective half of one FSDP2 stage: gather, release, reduce, as the schedule says."""

    def __init__(self, module: FSDPModule) -> None:
        self._module = module

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

        Before that, gradients stay with the gathered parameters (in the reduction's data type).
        """
        self._module.set_is_last_backward(last)
        self._module.set_requires_gradient_sync(last)
        self._module.set_reshard_after_backward(last)

    def accumulate(self) -> None:
        """Move weight gradients that were computed outside autograd to where FSDP accumulates them."""
        for child in self._fsdp_modules():
            for group in child._get_fsdp_state()._fsdp_param_groups:
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
