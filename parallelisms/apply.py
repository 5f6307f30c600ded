"""The order in which parallelisms are applied to a stage's untouched module: one visible place.

1. float8, which exchanges linear layers for others that are cut and gathered like them;
2. tensor parallelism, on the plain model, so that all that follows sees a rank's own part;
3. expert parallelism, which spreads what tensor parallelism has cut;
4. context parallelism, inside everything else: only the attention of a layer knows of it;
5. activation checkpointing, so that what is recomputed is a whole layer of the plain model;
6. compilation, so that what is recomputed is in the graph too;
7. data parallelism, outermost, so that it gathers parameters once for the forward and once for the
   recomputation.

The pipeline needs nothing applied: a stage holds only its own modules.
"""

from __future__ import annotations

from torch import nn

from parallelisms.checkpointing import apply_activation_checkpointing
from parallelisms.compile import compile_layers
from parallelisms.context.apply import apply_context_parallelism
from parallelisms.context.cut import SequenceCut
from parallelisms.context.split import SequenceSplit
from parallelisms.data import Precision, ShardedStage, shard_data_parallel
from parallelisms.expert import apply_expert_parallelism
from parallelisms.float8 import convert_to_float8
from parallelisms.layout import EXPERT_SHARD, FSDP, REPLICATE, Parallelism
from parallelisms.mesh import Meshes
from parallelisms.tensor import apply_tensor_parallelism
from parallelisms.tensor_async import overlap_tensor_parallelism


def apply_parallelisms(
    module: nn.Module, meshes: Meshes, parallelism: Parallelism, precision: Precision
) -> ShardedStage | None:
    """Apply everything to one stage's module, on the meta device, in place."""
    if parallelism.float8 is not None:
        sharded = parallelism.sharded and meshes.parameters[FSDP].size() > 1
        convert_to_float8(module, parallelism.float8, meshes.parameters.device_type, sharded=sharded)
    if meshes.tensor.size() > 1:
        apply_tensor_parallelism(module, meshes.tensor, loss_parallel=parallelism.loss_parallel)
        if parallelism.overlap_tensor:
            overlap_tensor_parallelism(meshes.tensor)
    if meshes.experts is not None:
        apply_expert_parallelism(module, meshes.experts)
    if meshes.context is not None:
        split = SequenceSplit(meshes.context.size(), parallelism.balanced_context)
        apply_context_parallelism(module, meshes.context, split, parallelism.rotate_method)
    apply_activation_checkpointing(
        module,
        parallelism.checkpointing,
        parallelism.checkpointing_option,
        parallelism.checkpointing_budget,
    )
    if parallelism.compile_backend is not None:
        compile_layers(module, parallelism.compile_backend)
    if not parallelism.sharded:
        return None
    # Without replicas there is nothing to sum over them. Experts elsewhere need both dimensions.
    replicated = meshes.parameters[REPLICATE].size() > 1 or meshes.experts is not None
    return shard_data_parallel(
        module,
        meshes.parameters[REPLICATE, FSDP] if replicated else meshes.parameters[FSDP],
        precision,
        reshard_after_forward=not parallelism.keep_gathered,
        reshard_always=parallelism.release_always,
        cpu_offload=parallelism.cpu_offload,
        experts_mesh=None if meshes.experts is None else meshes.experts[REPLICATE, EXPERT_SHARD],
    )


def sequence_cut(meshes: Meshes, parallelism: Parallelism) -> SequenceCut | None:
    """What this rank has of every sequence; None: all of it."""
    if meshes.context is None:
        return None
    split = SequenceSplit(meshes.context.size(), parallelism.balanced_context)
    return SequenceCut(split, meshes.context.get_local_rank())
