"""The memory of a rank through a step, part by part, at the moment at which most is alive.

Counted is what the program asks for. What the allocator, the libraries and the driver take beside that is not
known beforehand; `accelerators.USABLE` leaves room for it. Where the model is not cut into stages and FSDP
releases parameters between forward and backward, the layers that are gathered at a time are counted, not each
at its time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from models.activations import Kernels
from trainer.plan.activations import StageActivations, stage_activations
from trainer.plan.context import context_buffers
from trainer.plan.formats import STATE_BYTES
from trainer.plan.state import StageParameters, StateBytes
from trainer.plan.walk import Moment, StageMemory, walk

if TYPE_CHECKING:
    from trainer.plan.plan import Plan

__all__ = ["Moment", "RankMemory", "forecast_memory", "fullest", "peak_without_checkpointing"]


@dataclass(frozen=True)
class RankMemory:
    """The memory of each rank at one place of the pipeline, in bytes.

    Attributes:
        state: parameters, gradients and optimizer, wherever they are kept.
        activations: the most that is held for backwards at once.
        peak: the moment at which most is alive on the device, and what that is.
        host: what is kept in the host's memory.
    """

    state: StateBytes
    activations: int
    peak: Moment
    host: int


def forecast_memory(plan: Plan, kernels: Kernels = Kernels.ACCELERATOR) -> tuple[RankMemory, ...]:
    """The memory of the ranks at each place of the pipeline, in order."""
    return tuple(_forecast_rank(plan, rank, kernels) for rank in range(plan.layout.pipeline))


def peak_without_checkpointing(plan: Plan) -> int:
    """Peak bytes of the fullest rank if no layer were computed again. The schedule stays as it is."""
    without = replace(plan, parallelism=replace(plan.parallelism, checkpointing="none"))
    return max(rank.peak.total for rank in forecast_memory(without))


def _forecast_rank(plan: Plan, rank: int, kernels: Kernels) -> RankMemory:
    owned = plan.schedule.placement.stages_of(rank)
    state = plan.bytes_of_rank[rank]
    offloaded = plan.parallelism.cpu_offload
    walked = walk(
        plan.schedule.actions[rank],
        {index: _stage_memory(plan, index, kernels) for index in owned},
        StateBytes(0, 0, 0) if offloaded else state,
        plan.rows,
        continues=plan.accumulation > 1,
        always=sum(_gathered_always(plan, index) for index in owned),
    )
    return RankMemory(state, walked.activations, walked.peak, state.total if offloaded else 0)


def _parameters(plan: Plan, index: int, but: str | None = None) -> StageParameters:
    """Of a stage, perhaps without one of its modules."""
    modules = [module for module in plan.stages[index].modules if module != but]
    return StageParameters.of(plan.sizes, modules, plan.layout)


def _stage_memory(plan: Plan, index: int, kernels: Kernels) -> StageMemory:
    parameters = _parameters(plan, index)
    parallelism, formats = plan.parallelism, plan.formats
    kept = parallelism.sharded and parallelism.keep_gathered
    gathered = parameters.whole * formats.compute_bytes
    return StageMemory(
        activations=_activations(plan, index, kernels),
        gradients=0 if parallelism.cpu_offload else parameters.state.gradients,
        gathered=gathered if kept else 0,
        gather_buffer=gathered if kept and plan.layout.sharding_ranks > 1 else 0,
        unreduced=_unreduced(plan, parameters) if parallelism.sharded else 0,
        reduce_buffer=max(parameters.largest_layer, parameters.rest.whole) * formats.reduction_bytes,
        fresh_gradients=_fresh_gradients(plan, index),
        fresh_input_gradients=parameters.rest.largest * formats.compute_bytes if index == 0 else 0,
        fresh_weight_gradients=gathered if _adds_in_another_format(plan) else 0,
        loss_gradient=_loss_gradient(plan, index),
        first=index == 0,
        last=index == len(plan.stages) - 1,
    )


def _loss_gradient(plan: Plan, index: int) -> int:
    """The output's weight gradient, which is added up in fp32."""
    if plan.loss_chunk is None or "output" not in plan.stages[index].modules:
        return 0
    return plan.sizes.vocab_size * plan.sizes.dim // plan.layout.tensor * STATE_BYTES


def _activations(plan: Plan, index: int, kernels: Kernels) -> StageActivations:
    activations = stage_activations(
        plan.sizes,
        plan.stages[index].modules,
        first=index == 0,
        seq_len=plan.rank_seq_len,
        tensor=plan.layout.tensor,
        loss_chunk=plan.loss_chunk,
        rows=max(plan.rows),
        formats=plan.formats,
        parallelism=plan.parallelism,
        kernels=kernels,
    )
    mask = plan.attention.mask_bytes(plan.seq_len, plan.formats.compute_bytes, kernels)
    if plan.layout.context > 1 and plan.parallelism.rotate_method != "ulysses":
        mask = 0  # made for each layer, and not kept
    buffers = context_buffers(plan)
    activations = activations.at_least(buffers.forward, buffers.backward)
    return activations.packed(mask) if plan.attention.masks_documents else activations.masked(mask)


def _adds_in_another_format(plan: Plan) -> bool:
    """Whether FSDP adds gradients up in another format than that in which they are computed."""
    return plan.parallelism.sharded and plan.formats.compute != plan.formats.reduction


def _fresh_gradients(plan: Plan, index: int) -> int:
    """What a backward has computed and not added yet: a parameter's gradient, or, where the format changes, those
    of a layer, and those that belong to no layer until its end. The output's may have been made with the loss."""
    parameters = _parameters(plan, index, but="output" if plan.loss_chunk is not None else None)
    if _adds_in_another_format(plan):
        return (parameters.largest_layer + parameters.rest.whole) * plan.formats.compute_bytes
    return max(group.largest for group in parameters.groups) * plan.formats.compute_bytes


def _completes_at_once(plan: Plan) -> bool:
    """Whether a single backward makes all gradients of the step, so that none waits for others."""
    return plan.microbatches * plan.accumulation == 1 and not plan.splits_backward


def _unreduced(plan: Plan, parameters: StageParameters) -> int:
    """Whole gradients that wait. They are added up in the reduction's format; those of a single backward are in
    the compute format, and only one layer's and those that belong to no layer are there at a time."""
    if _completes_at_once(plan):
        at_a_time = parameters.largest_layer + parameters.rest.whole
        return at_a_time * (plan.formats.compute_bytes + plan.formats.reduction_bytes)
    return parameters.whole * plan.formats.reduction_bytes


def _gathered_always(plan: Plan, index: int) -> int:
    """Gathered parameters of a stage that is not gathered as a whole by the schedule.

    In a single backward: the layer in use, the next one and the buffer it is gathered into, and what belongs
    to no layer. Between several backwards FSDP keeps all parameters, unless they are always released.
    """
    parallelism = plan.parallelism
    if not parallelism.sharded or parallelism.keep_gathered:
        return 0
    parameters = _parameters(plan, index)
    if not _completes_at_once(plan) and not parallelism.release_always:
        return parameters.whole * plan.formats.compute_bytes
    layers = min(3, len(parameters.layers)) * parameters.largest_layer
    return (parameters.rest.whole + layers) * plan.formats.compute_bytes


def fullest(ranks: Sequence[RankMemory]) -> int:
    """The index of the rank with the highest peak, the first of equals."""
    return max(range(len(ranks)), key=lambda rank: ranks[rank].peak.total)
