"""How long a step takes on a named accelerator, as far as arithmetic tells.

The schedule is timed with seconds instead of operations: matrix products run at `EFFICIENCY` of the peak, and a
message takes its bytes divided by the bandwidth. To this comes the communication of data parallelism that
computing cannot hide. It is an estimate: good for comparing layouts, not a promise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parallelisms.layout import CONTEXT, EXPERT, PIPELINE, REPLICATE, SHARD, TENSOR
from parallelisms.pipeline.costs import scaled
from parallelisms.pipeline.setting import Costs
from parallelisms.pipeline.simulate import simulate
from trainer.plan.accelerators import Accelerator
from trainer.plan.context import context_traffic, unevenness
from trainer.plan.expert_traffic import expert_traffic
from trainer.plan.network import RankTraffic, forecast_traffic
from trainer.plan.nodes import Nodes
from trainer.plan.stages import StagePlan, stage_costs
from trainer.plan.tensor_traffic import tensor_traffic

if TYPE_CHECKING:
    from trainer.plan.plan import Plan

# What eager kernels of large models reach of the peak when nothing else holds them up; published runs are at
# 0.35 to 0.55 with everything in it.
EFFICIENCY = 0.5
# The share of computing behind which a collective can hide: some of it starts or ends alone.
_HIDDEN = 0.8


@dataclass(frozen=True)
class StepEstimate:
    """Of one step, in seconds.

    Attributes:
        pipeline: the schedule with its bubble and its messages.
        exposed: gathering and reducing that nothing hides.
        tokens_per_second: of the whole job.
        mfu: model FLOPs utilisation, of the dense bf16 peak.
    """

    pipeline: float
    exposed: float
    tokens_per_second: float
    mfu: float

    @property
    def seconds(self) -> float:
        return self.pipeline + self.exposed


@dataclass(frozen=True)
class Bandwidths:
    """Bytes per second that a rank sends in the collectives and messages of each dimension."""

    shard: float
    replicate: float
    pipeline: float
    tensor: float
    context: float
    expert: float = math.inf


def bandwidths(accelerator: Accelerator, nodes: Nodes) -> Bandwidths | None:
    """None where the accelerator's are not known.

    A ring over several nodes is as fast as the network cards of the ranks that share a node together, but not
    faster than the connection inside it.
    """
    inside, between = accelerator.intra_node_bandwidth, accelerator.inter_node_bandwidth
    if inside is None or between is None:
        return None

    def of(name: str) -> float:
        place = nodes.place(name)
        return min(inside, place.in_node * between) if place.crosses_nodes else inside

    pipeline = between if nodes.place(PIPELINE).crosses_nodes else inside
    # Parameters are sharded over data-parallel and context ranks together.
    shard = min(of(SHARD), of(CONTEXT))
    # Every rank of an expert group sends to every other one, so those of other nodes are reached by its own card.
    spread = [place for place in nodes.dimensions if place.name == EXPERT]
    expert = between if any(place.crosses_nodes for place in spread) else inside
    return Bandwidths(shard, of(REPLICATE), pipeline, of(TENSOR), of(CONTEXT), expert)


def estimate_step(plan: Plan, accelerator: Accelerator, nodes: Nodes) -> StepEstimate | None:
    """The estimate for a plan; None where the accelerator's bandwidths, or its peak for this format, are not known."""
    speeds = bandwidths(accelerator, nodes)
    if speeds is None or accelerator.peak_flops is None or plan.formats.compute != "bfloat16":
        return None
    costs = costs_in_seconds(plan, accelerator, speeds)
    schedule = plan.schedule
    run = simulate(schedule.actions, schedule.placement, costs).step
    pipeline = run * plan.accumulation
    traffic = forecast_traffic(plan)
    exposed = max(
        exposed_collectives(plan, traffic[rank], speeds, costs) for rank in range(plan.layout.pipeline)
    )
    seconds = pipeline + exposed
    return StepEstimate(
        pipeline,
        exposed,
        plan.tokens_per_step / seconds,
        plan.flops_per_step / (seconds * accelerator.peak_flops * plan.layout.world_size),
    )


def costs_in_seconds(plan: Plan, accelerator: Accelerator, speeds: Bandwidths) -> Costs:
    """Seconds of each stage's work on one microbatch of the largest size, and of a message."""
    assert accelerator.peak_flops is not None
    tokens = max(plan.rows) * plan.rank_seq_len
    ranks = plan.layout.tensor
    operation = tokens / (accelerator.peak_flops * EFFICIENCY * ranks)
    costs = scaled(stage_costs(plan.stages), operation)
    message = tokens * plan.sizes.dim * plan.formats.compute_bytes / (speeds.pipeline * ranks)
    waits = [_waits(plan, stage, speeds, operation) for stage in plan.stages]
    return Costs(
        tuple(cost + each.forward for cost, each in zip(costs.forward, waits, strict=True)),
        tuple(cost + each.backward for cost, each in zip(costs.backward_input, waits, strict=True)),
        costs.backward_weight,
        message,
    )


@dataclass(frozen=True)
class _Waits:
    """Seconds of a microbatch beside the arithmetic: exchanges that nothing hides, and busier ranks."""

    forward: float
    backward: float


def _waits(plan: Plan, stage: StagePlan, speeds: Bandwidths, operation: float) -> _Waits:
    """Of one stage; `operation` is the seconds that one of its operations for a token takes for all tokens.

    Nothing is computed beside what a tensor group exchanges, of which half belongs to the forward, nor beside what
    context ranks gather or tokens on their way to experts. A ring computes attention with what it has while the next is on its way.
    """
    share = max(plan.rows) / (sum(plan.rows) * plan.accumulation)
    tensor = tensor_traffic(plan, stage.modules) * share / speeds.tensor / 2
    traffic = context_traffic(plan, stage.modules)
    forward, backward = (each * share / speeds.context for each in (traffic.forward, traffic.backward))
    sizes, length = plan.sizes, plan.seq_len
    attention = sum(sizes.flops_per_token(length, m) - sizes.flops_per_token(0, m) for m in stage.modules)
    third = attention / 3 * operation
    if plan.parallelism.rotate_method == "alltoall":
        forward, backward = max(0.0, forward - _HIDDEN * third), max(0.0, backward - _HIDDEN * 2 * third)
    more = (unevenness(plan) - 1) * third
    experts = expert_traffic(plan, stage.modules)
    there, back = (each * share / speeds.expert for each in (experts.forward, experts.backward))
    return _Waits(tensor + forward + there + more, tensor + backward + back + 2 * more)


def exposed_collectives(plan: Plan, traffic: RankTraffic, speeds: Bandwidths, costs: Costs) -> float:
    """Seconds of data-parallel collectives in a step that no computing hides.

    In a pipeline parameters are gathered before the first forward of a stage and gradients reduced after its
    last backward: those of one stage at each end of the step have nothing beside them. Without a pipeline FSDP
    gathers the next layer while one computes, and reduces beside the backward.
    """
    gather = traffic.gather / speeds.shard
    reduce = traffic.reduce_scatter / speeds.shard + traffic.all_reduce / speeds.replicate
    if plan.parallelism.keep_gathered:
        tied = traffic.tied / speeds.pipeline  # after everything else
        return (gather + reduce) / max(1, len(plan.stages) // plan.layout.pipeline) + tied
    runs = plan.microbatches * plan.accumulation
    forward = sum(costs.forward)
    backward = sum(costs.backward_input) + sum(costs.backward_weight)
    gathers = 1 + runs  # each about as long as the first
    in_forward, in_backward = gather / gathers, gather * runs / gathers
    layers = max(1, plan.sizes.n_layers)
    first = in_forward / layers + reduce / layers
    return (
        first
        + max(0.0, in_forward - _HIDDEN * forward)
        + max(0.0, reduce - _HIDDEN * backward, in_backward + reduce - _HIDDEN * runs * backward)
    )
