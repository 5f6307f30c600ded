"""Costs of stages: read off a prediction, measured from a timeline, and the factor between the two."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from parallelisms.pipeline.actions import Action, Kind
from parallelisms.pipeline.measured import RankMeasurement, Timeline
from parallelisms.pipeline.setting import Costs, Placement
from parallelisms.pipeline.simulate import Prediction

_HICCUP = 3.0  # times the median

# What made the input of an action: the kinds, and how far its stage is away.
_PRODUCERS = {
    Kind.FORWARD: ((Kind.FORWARD,), -1),
    Kind.BACKWARD: ((Kind.BACKWARD, Kind.BACKWARD_INPUT), 1),
    Kind.BACKWARD_INPUT: ((Kind.BACKWARD, Kind.BACKWARD_INPUT), 1),
}


def producers(action: Action, placement: Placement) -> tuple[Action, ...]:
    """The compute actions of other stages of which one makes the input of `action`; none for the ends."""
    kinds, step = _PRODUCERS.get(action.kind, ((), 0))
    stage = action.stage + step
    if not 0 <= stage < placement.stages:
        return ()
    return tuple(Action(stage, kind, action.microbatch, action.chunk) for kind in kinds)


def costs_of(prediction: Prediction, placement: Placement) -> Costs:
    """The costs that a prediction was made with. A backward in one go counts half as each of its parts."""
    spans = [(span.action, span.end - span.start) for each in prediction.spans for span in each]
    # A rank that was free before the message was made waited for the whole transfer. Others before it in its
    # channel can only have made that longer.
    whole = [each.start - each.made for each in _messages(prediction, placement) if each.made >= each.free]
    return _costs(spans, placement.stages, min(whole, default=0.0))


def scaled(costs: Costs, factor: float) -> Costs:
    """The costs in another unit."""
    return Costs(
        tuple(each * factor for each in costs.forward),
        tuple(each * factor for each in costs.backward_input),
        tuple(each * factor for each in costs.backward_weight),
        costs.transfer * factor,
    )


def cost_of(costs: Costs, action: Action) -> float:
    """What a compute action costs."""
    stage = action.stage
    match action.kind:
        case Kind.FORWARD:
            return costs.forward[stage]
        case Kind.BACKWARD_INPUT:
            return costs.backward_input[stage]
        case Kind.BACKWARD_WEIGHT:
            return costs.backward_weight[stage]
        case _:
            return costs.backward_input[stage] + costs.backward_weight[stage]


def seconds_per_unit(costs: Costs, ranks: Iterable[RankMeasurement]) -> float:
    """The factor from the unit of `costs` to the seconds that were measured.

    The median over all actions, so that it is that of the stages that are as planned, not of a slow one.
    """
    ratios = [
        each.seconds / planned
        for rank in ranks
        for each in rank.compute
        if (planned := cost_of(costs, each.action)) > 0
    ]
    return median(ratios) if ratios else 1.0


def measured_costs(timeline: Timeline) -> Costs:
    """The seconds of each stage's work on one microbatch, and of a transfer, as they were in a step.

    Of the work it is the mean over microbatches, runs and pipelines, without what took more than three times
    the median (a hiccup is no cost). It counts from the start of an action until the rank comes to the next
    one, so that what the executor and the host need in between is part of it: a step predicted from these
    costs is as long as the step was, if nothing but waiting comes in between. Where the backward was not split,
    each of its parts counts half: the split cannot be known.

    The transfer is the median over the messages that a rank stood still for from before they were made, the
    only ones whose time is known.
    """
    occupied = [each for rank in timeline.ranks for each in _occupied(rank)]
    transfers = [
        transfer.seconds
        for replica in timeline.replicas
        for transfer in exposed_transfers(timeline, timeline.pipeline(replica))
        if transfer.whole
    ]
    transfer = median(transfers) if transfers else 0.0
    return _costs(occupied, timeline.schedule.placement.stages, transfer)


def _occupied(rank: RankMeasurement) -> Iterator[tuple[Action, float]]:
    """Each compute action with the time for which it kept the rank from the next one."""
    done = rank.compute
    for each, after in zip(done, [*done[1:], None], strict=True):
        # Between two runs of the schedule the rank waits for its sends.
        whole = after is not None and after.run == each.run
        yield each.action, (after.came - each.start if whole and after is not None else each.seconds)


@dataclass(frozen=True, slots=True)
class ExposedTransfer:
    """A message that a rank stood still for after it had been made.

    `seconds` is how long; `whole` tells that the rank waited from before the message was made, so that this is
    all the time that the message took. The error of the clocks is in it.
    """

    action: Action
    run: int
    rank: int
    seconds: float
    whole: bool


def exposed_transfers(timeline: Timeline, pipeline: Sequence[RankMeasurement]) -> list[ExposedTransfer]:
    """The messages between the ranks of one pipeline that were not there when they were wanted."""
    microbatches, placement = timeline.schedule.microbatches, timeline.schedule.placement
    made = {each.numbered(microbatches): each.end for rank in pipeline for each in rank.compute}
    found = []
    for rank in pipeline:
        for each in rank.compute:
            if each.wait_start is None or each.wait_end is None:
                continue
            for producer in producers(each.numbered(microbatches), placement):
                if producer in made:
                    since = max(each.wait_start, made[producer])
                    whole = made[producer] >= each.wait_start
                    seconds = max(0.0, each.wait_end - since)
                    found.append(ExposedTransfer(each.action, each.run, rank.rank, seconds, whole))
    return found


def exposed_in_prediction(prediction: Prediction, placement: Placement) -> dict[Action, float]:
    """For how long each predicted action waits for a message that has been made."""
    return {
        each.action: each.start - max(each.free, each.made)
        for each in _messages(prediction, placement)
        if each.start > max(each.free, each.made)
    }


@dataclass(frozen=True, slots=True)
class _Message:
    """A predicted action that uses a message of another rank: when that was made, when the rank was free for the
    action, and when it began."""

    action: Action
    made: float
    free: float
    start: float


def _messages(prediction: Prediction, placement: Placement) -> Iterator[_Message]:
    made = {span.action: span.end for spans in prediction.spans for span in spans}
    for rank, spans in enumerate(prediction.spans):
        free = 0.0
        for span in spans:
            for producer in producers(span.action, placement):
                if producer in made and placement.owners[producer.stage] != rank:
                    yield _Message(span.action, made[producer], free, span.start)
            free = span.end


def _costs(done: Iterable[tuple[Action, float]], stages: int, transfer: float) -> Costs:
    durations: dict[tuple[Kind, int], list[float]] = {}
    for action, duration in done:
        durations.setdefault((action.kind, action.stage), []).append(duration)
    typical = {key: _mean_without_hiccups(values) for key, values in durations.items()}

    def of(kind: Kind, stage: int, share_of_whole: float) -> float:
        whole = typical.get((Kind.BACKWARD, stage), 0.0) * share_of_whole
        return typical.get((kind, stage), whole)

    return Costs(
        tuple(of(Kind.FORWARD, stage, 0.0) for stage in range(stages)),
        tuple(of(Kind.BACKWARD_INPUT, stage, 0.5) for stage in range(stages)),
        tuple(of(Kind.BACKWARD_WEIGHT, stage, 0.5) for stage in range(stages)),
        transfer,
    )


def _mean_without_hiccups(values: list[float]) -> float:
    most = _HICCUP * median(values)
    return fmean(value for value in values if value <= most)
