"""Bytes that a rank sends in a step, by kind.

A collective over n ranks is counted as its ring algorithm, which moves the least: for gathering and
reduce-scattering each rank sends (n - 1)/n of the whole, for an all-reduce twice that. As much is received.
Scalars (loss, norm, counted tokens) are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from models.tied import EMBEDDING, held_shapes
from parallelisms.pipeline.actions import Kind
from trainer.plan.context import context_traffic
from trainer.plan.expert_traffic import expert_traffic
from trainer.plan.formats import STATE_BYTES
from trainer.plan.state import ParameterGroup, StageParameters, cuts_of
from trainer.plan.tensor_traffic import tensor_traffic

if TYPE_CHECKING:
    from trainer.plan.plan import Plan


_IN_EVERY_PLAN = ("gather", "reduce_scatter", "all_reduce", "activations", "gradients")


@dataclass(frozen=True)
class RankTraffic:
    """Bytes sent in one step by each rank at one place of the pipeline.

    Attributes:
        gather: parameters to the other shard ranks (FSDP).
        reduce_scatter: gradients to the other shard ranks.
        all_reduce: gradients, summed over replicas.
        activations: to the ranks of next stages.
        gradients: to the ranks of previous stages.
        tensor: hidden states, their gradients and the like within tensor groups.
        context: keys, values and the like within context groups.
        expert: hidden states of tokens to the experts of other ranks, and their results.
        tied: gradients of an embedding of which two stages hold a copy.
    """

    gather: int
    reduce_scatter: int
    all_reduce: int
    activations: int = 0
    gradients: int = 0
    tensor: int = 0
    context: int = 0
    expert: int = 0
    tied: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, each.name) for each in fields(self))


def shown_kinds(ranks: Sequence[RankTraffic]) -> list[str]:
    """Names of the kinds to show: those that every plan has, others that some rank sends, and the total."""
    names = [each.name for each in fields(RankTraffic)]
    used = [name for name in names if name in _IN_EVERY_PLAN or any(getattr(rank, name) for rank in ranks)]
    return [*used, "total"]


def forecast_traffic(plan: Plan) -> tuple[RankTraffic, ...]:
    """The traffic of the ranks at each place of the pipeline, in order."""
    return tuple(
        replace(traffic, **_messages(plan, rank)) for rank, traffic in enumerate(collective_traffic(plan))
    )


def collective_traffic(plan: Plan) -> tuple[RankTraffic, ...]:
    """The same without the messages between stages."""
    parameters = [StageParameters.of(plan.sizes, stage.modules, plan.layout) for stage in plan.stages]
    placement = plan.schedule.placement
    collectives = [
        _collectives(plan, [parameters[index] for index in placement.stages_of(rank)])
        for rank in range(plan.layout.pipeline)
    ]
    return tuple(
        replace(
            each,
            tied=_tied(plan, rank),
            tensor=_tensor(plan, rank),
            context=_context(plan, rank),
            expert=_expert(plan, rank),
        )
        for rank, each in enumerate(collectives)
    )


def _collectives(plan: Plan, stages: Sequence[StageParameters]) -> RankTraffic:
    replicate, formats = plan.layout.replicate, plan.formats
    reduced = sum(stage.share for stage in stages) * formats.reduction_bytes
    return RankTraffic(
        gather=sum(_gathered(plan, stage) for stage in stages) * formats.compute_bytes,
        reduce_scatter=sum(stage.sent for stage in stages) * formats.reduction_bytes,
        all_reduce=2 * (replicate - 1) * reduced // replicate,
    )


def _tensor(plan: Plan, rank: int) -> int:
    stages = plan.schedule.placement.stages_of(rank)
    return sum(tensor_traffic(plan, plan.stages[index].modules) for index in stages)


def _context(plan: Plan, rank: int) -> int:
    stages = plan.schedule.placement.stages_of(rank)
    return sum(context_traffic(plan, plan.stages[index].modules).total for index in stages)


def _expert(plan: Plan, rank: int) -> int:
    stages = plan.schedule.placement.stages_of(rank)
    return sum(expert_traffic(plan, plan.stages[index].modules).total for index in stages)


def _tied(plan: Plan, rank: int) -> int:
    """An all-reduce of two ranks, each with its part of the matrix; nothing where one rank has both stages."""
    owners = plan.tied_owners
    if owners is None or rank not in owners or owners[0] == owners[1]:
        return 0
    cuts = cuts_of(plan.sizes, held_shapes(plan.sizes, (EMBEDDING,)), plan.layout)
    return ParameterGroup.of(cuts).share * STATE_BYTES


def _messages(plan: Plan, rank: int) -> dict[str, int]:
    """Bytes of activations and of gradients that go to other stages."""
    part = plan.rank_seq_len // plan.layout.tensor
    boundary = part * plan.sizes.dim * plan.formats.compute_bytes * plan.accumulation
    rows = {Kind.SEND_ACTIVATION: 0, Kind.SEND_GRADIENT: 0}
    for action in plan.schedule.actions[rank]:
        if action.kind in rows and action.microbatch is not None:
            rows[action.kind] += plan.rows[action.microbatch]
    return {
        "activations": rows[Kind.SEND_ACTIVATION] * boundary,
        "gradients": rows[Kind.SEND_GRADIENT] * boundary,
    }


def _gathered(plan: Plan, stage: StageParameters) -> int:
    """How many numbers of its own share a rank gives to others in a step, each of them counted.

    Once, where parameters stay gathered. Otherwise each backward gathers all but the last layer again, which
    stays from the forward; so does the first forward, while later ones find what the backward before left. Where they
    are always released, each forward and each backward gathers all.
    """
    if plan.parallelism.release_always:
        return 2 * plan.microbatches * plan.accumulation * stage.sent
    if plan.parallelism.keep_gathered:
        return stage.sent
    again = stage.sent - (stage.layers[-1].sent if stage.layers else 0)
    return stage.sent + plan.microbatches * plan.accumulation * again
