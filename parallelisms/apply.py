"""The order in which parallelisms are applied to a stage's untouched module: one visible place.

1. activation checkpointing, so that what is recomputed is a whole layer of the plain model;
2. data parallelism, outermost, so that it gathers parameters once for the forward and once for the
   recomputation.

The pipeline needs nothing applied: a stage holds only its own modules.
"""

from __future__ import annotations

from torch import nn

from parallelisms.checkpointing import apply_activation_checkpointing
from parallelisms.data import Precision, ShardedStage, shard_data_parallel
from parallelisms.layout import FSDP, REPLICATE, Parallelism
from parallelisms.mesh import Meshes


def apply_parallelisms(
    module: nn.Module, meshes: Meshes, parallelism: Parallelism, precision: Precision
) -> ShardedStage | None:
    """Apply everything to one stage's module, on the meta device, in place."""
    apply_activation_checkpointing(module, parallelism.checkpointing, parallelism.checkpointing_option)
    if not parallelism.sharded:
        return None
    return shard_data_parallel(
        module,
        meshes.parameters[REPLICATE, FSDP],
        precision,
        reshard_after_forward=not parallelism.keep_gathered,
        cpu_offload=parallelism.cpu_offload,
    )
