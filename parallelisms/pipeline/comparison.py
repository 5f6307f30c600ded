"""Where a measured step differs from its plan, and why, as far as the times can tell.

Lateness is inherited: one slow action delays what follows it on its rank, and what waits for its message on
others. So an action is reported only for the time that was lost *at* it: how much later than planned it ended,
less how much later the action before it on its rank ended. That time is either in the action's own work (it
was slow) or before it: the rank waited for a message (late receive), or it had what it needed and did not
start (the host was busy, or had not enqueued the work in time). A late receive is followed to the action on the
other rank where the time was lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import median

from parallelisms.pipeline.actions import Action, Kind
from parallelisms.pipeline.costs import cost_of, producers
from parallelisms.pipeline.measured import MeasuredAction, RankMeasurement, Timeline
from parallelisms.pipeline.simulate import Span

_RELATIVE_THRESHOLD = 0.05  # of a typical action: what is lost below this is noise
_LEAST_THRESHOLD = 20e-6  # seconds: what the executor itself takes between two actions
_SLOW_STAGE = 1.10  # times the plan, in the median


class Cause(Enum):
    """Why time was lost at an action."""

    SLOW_STAGE = "slow stage"  # this kind of work of this stage always takes longer than planned
    SLOW_ONCE = "slow this time"  # it took longer than it usually does
    LATE_RECEIVE = "late receive"  # the message had not been made in time
    SLOW_TRANSFER = "slow transfer"  # the message had been made and was long on its way
    HOST_BOUND = "host-bound"  # nothing was waited for; the host was not ready


@dataclass(frozen=True)
class LateAction:
    """An action at which time was lost against the plan.

    Attributes:
        action, run: which; `rank`: the global rank that carried it out.
        late: seconds after its planned end.
        lost: of these, the seconds that were lost at this action.
        cause: why.
        waits_for: of a late receive or slow transfer, the compute action that makes the message.
        origin: of a late receive, where the time was lost in the first place; None if that is not known.
    """

    action: Action
    run: int
    rank: int
    late: float
    lost: float
    cause: Cause
    waits_for: Action | None = None
    origin: Action | None = None
    origin_rank: int | None = None


@dataclass(frozen=True)
class LateGroup:
    """Late actions of one kind and stage with one cause, and where time was lost that caused them."""

    actions: tuple[LateAction, ...]  # in the order of the step

    @property
    def lost(self) -> float:
        """Seconds lost at all of them."""
        return sum(each.lost for each in self.actions)

    @property
    def late(self) -> float:
        """Seconds after its planned end of the one that was latest."""
        return max(each.late for each in self.actions)


@dataclass(frozen=True)
class StageCost:
    """The median of one kind of work of a stage, measured and planned, in seconds."""

    stage: int
    kind: Kind
    measured: float
    planned: float

    @property
    def ratio(self) -> float:
        return self.measured / self.planned if self.planned > 0 else 1.0


@dataclass(frozen=True)
class Comparison:
    """A measured step against its plan in seconds; `late` has the most time lost first."""

    planned_step: float
    measured_step: float
    threshold: float  # seconds below which nothing counts as late
    stages: tuple[StageCost, ...]
    late: tuple[LateAction, ...]

    def groups(self) -> tuple[LateGroup, ...]:
        """The late actions by what they have in common: first where time was lost, then who waited for it."""
        groups: dict[tuple, list[LateAction]] = {}
        for each in self.late:
            origin = None if each.origin is None else (each.origin.stage, each.origin.kind)
            groups.setdefault((each.cause, each.action.stage, each.action.kind, origin), []).append(each)
        in_order = (
            LateGroup(tuple(sorted(members, key=lambda each: (each.run, each.action.microbatch or 0))))
            for members in groups.values()
        )
        return tuple(
            sorted(in_order, key=lambda group: (group.actions[0].cause is Cause.LATE_RECEIVE, -group.lost))
        )

    def lost_by_cause(self) -> dict[Cause, float]:
        """The seconds lost to each cause, over all ranks, the largest first."""
        totals: dict[Cause, float] = {}
        for each in self.late:
            totals[each.cause] = totals.get(each.cause, 0.0) + each.lost
        return dict(sorted(totals.items(), key=lambda item: -item[1]))


def compare(timeline: Timeline, replica: int = 0) -> Comparison:
    """Hold one pipeline of a measured step against the plan, scaled to seconds by one factor.

    Raises ValueError if there is no such pipeline.
    """
    return _Comparer(timeline, timeline.pipeline(replica)).result()


@dataclass(frozen=True, slots=True)
class _Pair:
    """An action as it was and as it was planned; both count from the first start of a compute action."""

    measured: MeasuredAction
    rank: int
    position: int
    start: float
    end: float
    planned_start: float
    planned_end: float

    @property
    def late(self) -> float:
        return self.end - self.planned_end


class _Comparer:
    def __init__(self, timeline: Timeline, pipeline: Sequence[RankMeasurement]) -> None:
        self._timeline = timeline
        self._pipeline = pipeline
        self._plan = timeline.plan()
        self._stages = self._stage_costs()
        typical = [each.planned for each in self._stages if each.planned > 0]
        self._threshold = max(
            _LEAST_THRESHOLD,
            2 * timeline.clock_bound,
            _RELATIVE_THRESHOLD * (median(typical) if typical else 0.0),
        )
        self._rows = [self._pairs(rank, spans) for rank, spans in enumerate(self._plan.spans)]
        self._by_action = {
            pair.measured.numbered(timeline.schedule.microbatches): pair for row in self._rows for pair in row
        }

    def result(self) -> Comparison:
        late = {key: found for key, pair in self._by_action.items() if (found := self._examine(pair))}
        ends = [pair.end for row in self._rows for pair in row]
        traced = [self._trace(each, late) for each in late.values()]
        return Comparison(
            self._plan.step,
            max(ends, default=0.0),
            self._threshold,
            self._stages,
            tuple(sorted(traced, key=lambda each: -each.lost)),
        )

    def _stage_costs(self) -> tuple[StageCost, ...]:
        times: dict[tuple[int, Kind], list[MeasuredAction]] = {}
        for rank in self._pipeline:
            for each in rank.compute:
                times.setdefault((each.action.stage, each.action.kind), []).append(each)
        return tuple(
            StageCost(
                stage,
                kind,
                median(each.seconds for each in done),
                cost_of(self._timeline.plan_costs, done[0].action),
            )
            for (stage, kind), done in sorted(times.items(), key=lambda item: (item[0][0], item[0][1].value))
        )

    def _pairs(self, rank: int, spans: Sequence[Span]) -> list[_Pair]:
        zero = min((each.compute[0].start for each in self._pipeline if each.compute), default=0.0)
        # The executor carries out exactly the planned list: the n-th compute action is the plan's n-th.
        return [
            _Pair(
                each,
                self._pipeline[rank].rank,
                position,
                each.start - zero,
                each.end - zero,
                span.start,
                span.end,
            )
            for position, (each, span) in enumerate(zip(self._pipeline[rank].compute, spans, strict=False))
        ]

    def _before(self, pair: _Pair) -> tuple[float, float]:
        """The end of the action before on the same rank, measured and planned."""
        if pair.position == 0:
            return 0.0, 0.0
        row = self._rows[self._timeline.schedule.placement.owners[pair.measured.action.stage]]
        before = row[pair.position - 1]
        return before.end, before.planned_end

    def _examine(self, pair: _Pair) -> LateAction | None:
        """What was lost at this action, if that is worth telling."""
        end_before, planned_before = self._before(pair)
        lost = pair.late - (end_before - planned_before)
        if lost < self._threshold or pair.late < self._threshold:
            return None
        planned_work = pair.planned_end - pair.planned_start
        in_work = (pair.end - pair.start) - planned_work
        before_work = (pair.start - end_before) - (pair.planned_start - planned_before)
        each = pair.measured
        cause, source = Cause.HOST_BOUND, None
        if in_work >= before_work:
            cause = self._slowness(each)
        elif each.waited >= 0.5 * (pair.start - end_before):
            cause, source = self._message(pair)
        return LateAction(
            each.action,
            each.run,
            pair.rank,
            pair.late,
            lost,
            cause,
            waits_for=None if source is None else source.measured.action,
        )

    def _slowness(self, each: MeasuredAction) -> Cause:
        ratios = {(cost.stage, cost.kind): cost.ratio for cost in self._stages}
        slow = ratios[each.action.stage, each.action.kind] >= _SLOW_STAGE
        return Cause.SLOW_STAGE if slow else Cause.SLOW_ONCE

    def _message(self, pair: _Pair) -> tuple[Cause, _Pair | None]:
        """Whether the message was made late or was long on its way, and what made it."""
        source = self._source(pair)
        if source is None:
            return Cause.LATE_RECEIVE, None
        on_its_way = pair.start - max(source.end, self._before(pair)[0])
        made_late = source.late
        return (Cause.SLOW_TRANSFER if on_its_way > made_late else Cause.LATE_RECEIVE), source

    def _source(self, pair: _Pair) -> _Pair | None:
        schedule = self._timeline.schedule
        wanted = producers(pair.measured.numbered(schedule.microbatches), schedule.placement)
        return next((self._by_action[each] for each in wanted if each in self._by_action), None)

    def _trace(self, found: LateAction, late: dict[Action, LateAction]) -> LateAction:
        """The late receive with the action where its time was lost."""
        if found.cause is not Cause.LATE_RECEIVE:
            return found
        current, pair = found, self._pair(found)
        while current.cause is Cause.LATE_RECEIVE:
            source = self._source(pair)
            origin = None if source is None else self._worst_until(source, late)
            # Time goes backwards at each turn, so this ends.
            if origin is None:
                return found
            current, pair = origin, self._pair(origin)
        return LateAction(
            found.action,
            found.run,
            found.rank,
            found.late,
            found.lost,
            found.cause,
            found.waits_for,
            current.action,
            current.rank,
        )

    def _pair(self, found: LateAction) -> _Pair:
        key = MeasuredAction(found.action, 0.0, 0.0, found.run)
        return self._by_action[key.numbered(self._timeline.schedule.microbatches)]

    def _worst_until(self, pair: _Pair, late: dict[Action, LateAction]) -> LateAction | None:
        """Where the rank of `pair` lost most time since it was last on schedule, up to and with `pair`."""
        row = self._rows[self._timeline.schedule.placement.owners[pair.measured.action.stage]]
        worst: LateAction | None = None
        for each in reversed(row[: pair.position + 1]):
            if each.late < self._threshold:
                break
            found = late.get(each.measured.numbered(self._timeline.schedule.microbatches))
            if found is not None and (worst is None or found.lost > worst.lost):
                worst = found
        return worst
