"""Timelines made up from predictions, so that what was measured is known exactly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from parallelisms.pipeline.actions import Action, Kind
from parallelisms.pipeline.assemble import ClockOffset, RankReport
from parallelisms.pipeline.costs import costs_of, producers
from parallelisms.pipeline.factory import PipelineSchedule, build_schedule
from parallelisms.pipeline.measured import (
    MeasuredAction,
    MeasuredSchedule,
    RankMeasurement,
    RankTimeline,
    Timeline,
)
from parallelisms.pipeline.schedules.catalogue import find
from parallelisms.pipeline.setting import Costs, Setting
from parallelisms.pipeline.simulate import Prediction, simulate


def schedule_of(
    name: str,
    ranks: int,
    microbatches: int,
    stages_per_rank: int | None = None,
    unit: float = 1.0,
    transfer: float = 0.0,
) -> PipelineSchedule:
    """Every part of a rank's share takes `unit`."""
    placement = find(name).place(ranks, stages_per_rank)
    each = unit * ranks / placement.stages
    costs = Costs.equal(placement.stages, each, each, each, transfer)
    return build_schedule(name, Setting(placement, microbatches, costs))


def measured(
    schedule: PipelineSchedule,
    costs: Costs | None = None,
    *,
    delays: Mapping[str, float] | None = None,
    pauses: Mapping[str, float] | None = None,
) -> Timeline:
    """A timeline in which the schedule went as simulated with `costs`.

    Args:
        schedule: its prediction is the plan.
        costs: those of the plan by default.
        delays: how much longer single actions took, e.g. {"2F0": 3.0}.
        pauses: how long a rank did nothing before an action although it could have begun.
    """
    placement = schedule.placement
    plan = costs_of(schedule.prediction, placement)
    delays, pauses = delays or {}, pauses or {}
    if delays or pauses:
        prediction = _replay(schedule, costs or plan, delays, pauses)
    else:
        prediction = simulate(schedule.actions, placement, costs or plan)
    made = {span.action: span.end for spans in prediction.spans for span in spans}
    ranks = []
    for rank, spans in enumerate(prediction.spans):
        actions, free = [], 0.0
        for span in spans:
            inputs = [made[each] for each in producers(span.action, placement) if each in made]
            waits = bool(inputs) and inputs[0] > free and placement.owners[span.action.stage] == rank
            pause = pauses.get(str(span.action), 0.0)
            actions.append(
                MeasuredAction(
                    span.action,
                    span.start,
                    span.end,
                    wait_start=free if waits else None,
                    wait_end=span.start - pause if waits else None,
                    waits_for=_receive(span.action) if waits else None,
                    peer=0 if waits else None,
                )
            )
            free = span.end
        ranks.append(RankMeasurement(rank, rank, 0, "host", "cpu", 0.0, tuple(actions)))
    record = MeasuredSchedule(schedule.name, placement, schedule.microbatches, 1, schedule.actions)
    return Timeline(3, "made up", 0.0, record, plan, tuple(ranks))


def _replay(
    schedule: PipelineSchedule, costs: Costs, delays: Mapping[str, float], pauses: Mapping[str, float]
) -> Prediction:
    """The simulation with single actions that take longer or begin later."""
    base = simulate(schedule.actions, schedule.placement, costs)
    done: dict[Action, float] = {}
    rows = [list(spans) for spans in base.spans]
    spans: list[list] = [[] for _ in rows]
    while any(len(out) < len(row) for out, row in zip(spans, rows, strict=True)):
        for out, row in zip(spans, rows, strict=True):
            while len(out) < len(row):
                span = row[len(out)]
                needed = producers(span.action, schedule.placement)
                if needed and not any(each in done for each in needed):
                    break
                start = max([out[-1].end if out else 0.0, *(done[each] for each in needed if each in done)])
                start += pauses.get(str(span.action), 0.0)
                end = start + (span.end - span.start) + delays.get(str(span.action), 0.0)
                done[span.action] = end
                out.append(replace(span, start=start, end=end))
    return replace(base, spans=tuple(tuple(each) for each in spans))


def _receive(action: Action) -> Action:
    kind = Kind.RECEIVE_ACTIVATION if action.kind is Kind.FORWARD else Kind.RECEIVE_GRADIENT
    return Action(action.stage, kind, action.microbatch)


def report(
    rank: int,
    actions: Sequence[MeasuredAction],
    origin_ns: int,
    offset_ns: int = 0,
    bound_ns: int = 0,
    boot: str = "a",
    measured_ns: int = 0,
) -> RankReport:
    """What a rank hands in."""
    timeline = RankTimeline(tuple(actions), origin_ns, "cpu", "clock", 1e-6 * rank)
    return RankReport(
        rank, rank, 0, f"host{rank}", boot, ClockOffset(offset_ns, bound_ns, measured_ns), timeline
    )


def every_action(timeline: Timeline, change: Callable[[MeasuredAction], MeasuredAction]) -> Timeline:
    """The timeline with each action changed."""
    ranks = tuple(
        replace(rank, actions=tuple(change(each) for each in rank.actions)) for rank in timeline.ranks
    )
    return replace(timeline, ranks=ranks)
