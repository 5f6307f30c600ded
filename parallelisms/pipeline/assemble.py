"""One timeline of the job from what its ranks recorded, each on its own clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from parallelisms.pipeline.actions import Action, Kind
from parallelisms.pipeline.costs import costs_of, scaled, seconds_per_unit
from parallelisms.pipeline.factory import PipelineSchedule
from parallelisms.pipeline.measured import (
    MeasuredAction,
    MeasuredSchedule,
    RankMeasurement,
    RankTimeline,
    Timeline,
)

_DRIFT = 100e-6  # clocks of two hosts go apart by less, per second

_ALIGNMENT = (
    "ping-pong with rank 0 over the process group right after the step (Cristian 1989), the round with the "
    "shortest round trip counts, error at most half of it; between hosts, 100 ppm of drift since the start of "
    "the step is added"
)


@dataclass(frozen=True)
class ClockOffset:
    """What this rank's monotonic clock lacks against rank 0's, known to within `bound_ns`; when it was measured."""

    offset_ns: int
    bound_ns: int
    measured_ns: int


@dataclass(frozen=True)
class RankReport:
    """What a rank hands to rank 0. `boot` tells hosts apart: ranks with the same share one monotonic clock."""

    rank: int
    pipeline_rank: int
    replica: int
    host: str
    boot: str
    offset: ClockOffset
    timeline: RankTimeline


def assemble(step: int, reports: Sequence[RankReport], schedule: PipelineSchedule) -> Timeline:
    """Put all ranks on rank 0's clock, with 0 when the first of them came to its first action."""
    reference = reports[0].timeline.origin_ns
    shifts = {
        each.rank: (each.timeline.origin_ns + each.offset.offset_ns - reference) / 1e9 for each in reports
    }
    begins = [shifts[each.rank] + each.timeline.actions[0].came for each in reports if each.timeline.actions]
    zero = min(begins, default=0.0)
    ranks = [_on_common_clock(each, shifts[each.rank] - zero, reports[0].boot) for each in reports]
    ranks = _complete_sends(ranks)
    bounds = sorted((each.clock_bound for each in ranks), reverse=True)
    runs = 1 + max((each.run for rank in ranks for each in rank.actions), default=0)
    plan = costs_of(schedule.prediction, schedule.placement)
    return Timeline(
        step=step,
        clock_method=_method(reports),
        clock_bound=sum(bounds[:2]),
        schedule=MeasuredSchedule(
            schedule.name, schedule.placement, schedule.microbatches, runs, schedule.actions
        ),
        plan_costs=scaled(plan, seconds_per_unit(plan, ranks)),
        ranks=tuple(ranks),
    )


def _method(reports: Sequence[RankReport]) -> str:
    clocks = sorted({each.timeline.clock for each in reports})
    related = ""
    if any(each.timeline.clock_bound > 0 for each in reports):
        related = (
            ", related to the host's monotonic clock on the idle device after the step by the shortest of "
            "several round trips"
        )
    ranks = f"; ranks: {_ALIGNMENT}" if len(reports) > 1 else ""
    return f"actions: {', '.join(clocks)}{related}{ranks}"


def _on_common_clock(report: RankReport, shift: float, boot: str) -> RankMeasurement:
    bound = report.timeline.clock_bound + report.offset.bound_ns / 1e9
    if report.boot != boot:
        bound += _DRIFT * (report.offset.measured_ns - report.timeline.origin_ns) / 1e9
    actions = tuple(each.shifted(shift) for each in report.timeline.actions)
    return RankMeasurement(
        report.rank,
        report.pipeline_rank,
        report.replica,
        report.host,
        report.timeline.device,
        bound,
        actions,
    )


_RECEIVE_OF = {
    Kind.SEND_ACTIVATION: (Kind.RECEIVE_ACTIVATION, 1),
    Kind.SEND_GRADIENT: (Kind.RECEIVE_GRADIENT, -1),
}


def _complete_sends(ranks: list[RankMeasurement]) -> list[RankMeasurement]:
    """A message that its receiver has is sent. Senders often notice later, some only at the end of the list."""
    received = {
        (rank.replica, each.action, each.run): each.end
        for rank in ranks
        for each in rank.actions
        if each.action.kind.is_receive
    }

    def completed(each: MeasuredAction, replica: int) -> MeasuredAction:
        if not each.action.kind.is_send:
            return each
        kind, step = _RECEIVE_OF[each.action.kind]
        receive = Action(each.action.stage + step, kind, each.action.microbatch, each.action.chunk)
        there = received.get((replica, receive, each.run), each.end)
        return replace(each, end=max(each.start, min(each.end, there)))

    return [
        replace(rank, actions=tuple(completed(each, rank.replica) for each in rank.actions)) for rank in ranks
    ]
