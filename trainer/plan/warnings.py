"""What a person of experience would say about a plan: one function for each remark.

The remarks of `plan_warnings` follow from the plan alone; those of `accelerator_warnings` need to know on what it
runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from parallelisms.layout import REPLICATE, SHARD
from parallelisms.pipeline.schedules.catalogue import find
from trainer.plan.accelerators import USABLE, Accelerator
from trainer.plan.memory import RankMemory, fullest, peak_without_checkpointing
from trainer.plan.nodes import Nodes

if TYPE_CHECKING:
    from trainer.plan.plan import Plan

_GIB = 1024**3
_LARGE_BUBBLE = 0.2
_UNEVEN = 1.15  # the busiest rank against the mean
_FEW_TOKENS = 2048  # of a microbatch: below, matrix products do not fill a large accelerator
_LARGE_MODEL = 10**9  # parameters from which the remarks about large accelerators mean anything


def plan_warnings(plan: Plan) -> tuple[str, ...]:
    """The remarks that hold on any machine."""
    remarks = (
        _bubble(plan),
        _uneven_stages(plan),
        _uneven_microbatches(plan),
        _small_microbatches(plan),
        _holds_all_microbatches(plan),
        _whole_gradients(plan),
        _tiles(plan),
    )
    return tuple(remark for remark in remarks if remark is not None)


def accelerator_warnings(
    plan: Plan, memory: Sequence[RankMemory], accelerator: Accelerator | None, nodes: Nodes
) -> tuple[str, ...]:
    """The remarks about a named accelerator (None: none named) and nodes of it."""
    remarks = (
        _over_memory(plan, memory, accelerator),
        _loss_memory(plan, accelerator),
        _needless_checkpointing(plan, accelerator),
        _full_precision(plan, accelerator),
        _shard_crosses_nodes(plan, accelerator, nodes),
        _replicas_in_node(plan, nodes),
        _broken_nodes(plan, nodes),
    )
    return tuple(remark for remark in remarks if remark is not None)


def _bubble(plan: Plan) -> str | None:
    bubble, ranks = plan.schedule.prediction.step_bubble, plan.layout.pipeline
    if ranks == 1 or bubble < _LARGE_BUBBLE:
        return None
    return (
        f"{bubble:.0%} of the step is bubble: more microbatches ({plan.microbatches} now, {4 * ranks} is a good "
        f"number for {ranks} pipeline ranks), a smaller pipeline_parallel_degree, or a schedule with several "
        f"stages per rank or with a split backward would lower it"
    )


def _uneven_stages(plan: Plan) -> str | None:
    work = [0] * plan.layout.pipeline
    for stage in plan.stages:
        work[stage.owner] += stage.flops_per_token + stage.recomputed_flops_per_token
    mean = sum(work) / len(work)
    busiest = max(range(len(work)), key=work.__getitem__)
    if work[busiest] < _UNEVEN * mean:
        return None
    return (
        f"pipeline rank {busiest} has {work[busiest] / mean:.2f} x the work of the mean rank, and the others wait "
        "for it: another number of stages, or other pipeline_parallel_split_points, would be more even"
    )


def _uneven_microbatches(plan: Plan) -> str | None:
    if len(set(plan.rows)) == 1 or plan.layout.pipeline == 1:
        return None
    return (
        f"microbatches of {max(plan.rows)} and of {min(plan.rows)} sequences: the larger ones set the pace; "
        f"a training.batch_size that is a multiple of {plan.microbatches} would avoid it"
    )


def _small_microbatches(plan: Plan) -> str | None:
    tokens = min(plan.rows) * plan.rank_seq_len
    if plan.parameters < _LARGE_MODEL or tokens >= _FEW_TOKENS:
        return None
    return (
        f"a microbatch is only {tokens:,} tokens on a rank: matrix products of that height do not fill a large accelerator; "
        f"{_FEW_TOKENS:,} and more are better"
    )


def _holds_all_microbatches(plan: Plan) -> str | None:
    ranks, held = plan.layout.pipeline, max(plan.schedule.proof.peak_share)
    name = plan.schedule.name
    if ranks == 1 or held < plan.microbatches or plan.microbatches <= 1.5 * ranks:
        return None
    instead = "1F1B" if find(name).single_stage else "Interleaved1F1B"
    return (
        f"{name} holds the activations of all {plan.microbatches} microbatches at once; {instead} has the same "
        f"bubble and holds about {ranks}"
    )


def _whole_gradients(plan: Plan) -> str | None:
    runs = plan.microbatches * plan.accumulation
    if (
        not plan.parallelism.sharded
        or plan.parallelism.keep_gathered
        or runs == 1
        or plan.layout.sharding_ranks == 1
    ):
        return None
    size = plan.parameters * (plan.formats.compute_bytes + plan.formats.reduction_bytes)
    if plan.parameters < _LARGE_MODEL:
        return None
    return (
        f"{runs} backwards add up before gradients are reduced: every rank holds all parameters and all gradients "
        f"for it ({size / _GIB:.0f} GiB); one larger microbatch, or a global batch reached with more ranks, needs "
        "neither"
    )


def _tiles(plan: Plan) -> str | None:
    vocabulary = plan.sizes.vocab_size
    if plan.parameters < _LARGE_MODEL or vocabulary % 64 == 0:
        return None
    better = -(-vocabulary // 64) * 64
    return f"vocab_size {vocabulary} is no multiple of 64: matrix units work on tiles, and {better} would be faster"


def _over_memory(plan: Plan, memory: Sequence[RankMemory], accelerator: Accelerator | None) -> str | None:
    if accelerator is None or accelerator.memory is None:
        return None
    rank = fullest(memory)
    peak, room = memory[rank].peak, accelerator.memory
    if peak.total <= USABLE * room:
        return None
    parts = {
        "the training state": peak.parameters + peak.gradients + peak.optimizer,
        "gathered parameters": peak.gathered,
        "gradients to be reduced": peak.unreduced,
        "activations": peak.activations,
        "buffers": peak.buffers,
        "the work of one action": peak.workspace,
    }
    largest = max(parts, key=parts.__getitem__)
    return (
        f"pipeline rank {rank} needs {peak.total / _GIB:.1f} GiB, "
        + ("more than" if peak.total > room else f"more than {USABLE:.0%} of")
        + f" the {room / _GIB:.1f} GiB of {accelerator.name}; most of it, {parts[largest] / _GIB:.1f} GiB, is "
        f"{largest}: {_less(largest, plan)}"
    )


def _less(part: str, plan: Plan) -> str:
    """What would make a part smaller."""
    if part == "activations" and plan.parallelism.checkpointing != "full":
        return "[activation_checkpoint] mode, smaller microbatches or a schedule that holds fewer would help"
    if part in ("activations", "buffers", "the work of one action"):
        return "smaller microbatches or a shorter training.seq_len would help"
    if part == "the training state":
        return "a larger data_parallel_shard_degree or pipeline_parallel_degree would help"
    return "a larger pipeline_parallel_degree would help"


def _loss_memory(plan: Plan, accelerator: Accelerator | None) -> str | None:
    if accelerator is None or accelerator.memory is None or plan.loss_chunk is not None:
        return None
    rank = plan.stages[-1].owner
    tokens = max(plan.rows) * plan.rank_seq_len
    logits = plan.sizes.vocab_size // (plan.layout.tensor if plan.parallelism.loss_parallel else 1)
    workspace = tokens * logits * 12  # softmax and two gradients, in fp32
    if workspace < 0.25 * accelerator.memory:
        return None
    return (
        f"the loss of one microbatch needs {workspace / _GIB:.1f} GiB on pipeline rank {rank}: {logits:,} "
        f"logits for each of {tokens:,} tokens, in fp32; smaller microbatches need less"
    )


def _needless_checkpointing(plan: Plan, accelerator: Accelerator | None) -> str | None:
    if accelerator is None or accelerator.memory is None or plan.parallelism.checkpointing == "none":
        return None
    peak = peak_without_checkpointing(plan)
    if peak > USABLE * accelerator.memory:
        return None
    extra = plan.recomputed_flops_per_token / plan.flops_per_token
    return (
        f"activation checkpointing computes {extra:.0%} more than needed: without it the peak would be "
        f"{peak / _GIB:.1f} GiB, which fits {accelerator.name}"
    )


def _full_precision(plan: Plan, accelerator: Accelerator | None) -> str | None:
    if accelerator is None or accelerator.peak_flops is None or plan.formats.compute != "float32":
        return None
    return (
        "training.mixed_precision_param = float32: matrix products are several times slower than in bfloat16, and "
        "attention has no flash kernel for it, so that it keeps seq_len x seq_len scores that are not counted here"
    )


def _shard_crosses_nodes(plan: Plan, accelerator: Accelerator | None, nodes: Nodes) -> str | None:
    place, size = nodes.place(SHARD), nodes.gpus_per_node
    if not place.crosses_nodes or plan.parameters < _LARGE_MODEL:
        return None
    if place.in_node == 1:
        return "no two ranks of a shard group share a node: its collectives run at the speed of the network"
    state = max(rank.total for rank in plan.bytes_of_rank) * place.degree // size
    if accelerator is not None and accelerator.memory is not None and state > accelerator.memory // 2:
        return None  # the state needs so many ranks
    return (
        f"shard {place.degree} spans nodes of {size}: parameters are gathered over the network; "
        f"data_parallel_shard_degree {size} with data_parallel_replicate_degree "
        f"{max(1, plan.layout.data_ranks // size)} gathers inside a node, for {state / _GIB:.1f} GiB of state per rank"
    )


def _replicas_in_node(plan: Plan, nodes: Nodes) -> str | None:
    place = nodes.place(REPLICATE)
    if place.degree == 1 or place.crosses_nodes or plan.parameters < _LARGE_MODEL:
        return None
    return (
        f"the {place.degree} replicas share a node: shard over them too "
        f"(data_parallel_shard_degree {plan.layout.data_ranks}), which takes memory off every rank and is as fast"
    )


def _broken_nodes(plan: Plan, nodes: Nodes) -> str | None:
    world, size = plan.layout.world_size, nodes.gpus_per_node
    if world <= size or world % size == 0:
        return None
    return f"{world} ranks do not fill nodes of {size}: the last has {world % size}"
