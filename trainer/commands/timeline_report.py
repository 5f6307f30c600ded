"""What differs from the plan, as lines for a terminal: the second half of `stageline timeline RUN_FOLDER`."""

from __future__ import annotations

from collections.abc import Iterator

from parallelisms.pipeline.actions import Kind
from parallelisms.pipeline.advice import Advice, Candidate, advise
from parallelisms.pipeline.comparison import Cause, Comparison, LateGroup, StageCost, compare
from parallelisms.pipeline.costs import measured_costs
from parallelisms.pipeline.measured import Timeline
from parallelisms.pipeline.picture import duration

_MOST_ROWS = 12
_NOTABLE = 0.10  # a stage whose costs differ from the plan's by less is as planned
_WORK = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "input gradient",
    Kind.BACKWARD_WEIGHT: "weight gradient",
}


def report_lines(timeline: Timeline, replica: int) -> Iterator[str]:
    """The comparison with the plan, and the schedule that would be fastest."""
    comparison = compare(timeline, replica)
    yield "What differs from the plan"
    yield from _steps(timeline, comparison)
    yield from _stages(comparison)
    yield from _late(comparison)
    yield ""
    yield "Predicted steps of schedules with the costs just measured, over the same stages"
    yield from _advice(advise(timeline))


def _steps(timeline: Timeline, comparison: Comparison) -> Iterator[str]:
    predicted = timeline.schedule.simulate(measured_costs(timeline)).step
    measured = comparison.measured_step
    yield (
        f"  step: {duration(measured)} measured, {duration(comparison.planned_step)} planned "
        f"({_difference(measured, comparison.planned_step)}), {duration(predicted)} predicted from the measured "
        f"costs ({_difference(measured, predicted)})"
    )


def _difference(value: float, against: float) -> str:
    return f"{value / against - 1:+.1%}" if against > 0 else "no plan"


def _stages(comparison: Comparison) -> Iterator[str]:
    notable = [each for each in comparison.stages if abs(each.ratio - 1) >= _NOTABLE]
    if not notable:
        yield "  every stage costs what was planned, within 10%"
        return
    yield "  stages that cost more or less than planned:"
    for each in sorted(notable, key=lambda each: -abs(each.ratio - 1))[:_MOST_ROWS]:
        yield f"    {_stage(each)}"


def _stage(cost: StageCost) -> str:
    return (
        f"stage {cost.stage} {_WORK[cost.kind]:<15} {duration(cost.measured):>9}, planned "
        f"{duration(cost.planned):>9}  ({cost.ratio:.2f}x)"
    )


def _late(comparison: Comparison) -> Iterator[str]:
    if not comparison.late:
        yield f"  no action was late by more than {duration(comparison.threshold)}"
        return
    groups = comparison.groups()
    yield f"  late actions, with more than {duration(comparison.threshold)} lost at each; causes first:"
    yield f"    {'actions':<24}{'rank':>5}{'lost':>10}{'late by':>10}  cause"
    for group in groups[:_MOST_ROWS]:
        yield (
            f"    {_names(group):<24}{group.actions[0].rank:>5}{duration(group.lost):>10}"
            f"{duration(group.late):>10}  {_cause(group)}"
        )
    if len(groups) > _MOST_ROWS:
        rest = groups[_MOST_ROWS:]
        lost = duration(sum(group.lost for group in rest))
        yield f"    and {sum(len(group.actions) for group in rest)} more, with {lost} lost"
    totals = ", ".join(
        f"{cause.value} {duration(lost)}" for cause, lost in comparison.lost_by_cause().items()
    )
    yield f"  lost over all ranks: {totals}"


def _names(group: LateGroup) -> str:
    names = [str(each.action) + (f"/{each.run}" if each.run else "") for each in group.actions]
    shown = " ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} (+{len(names) - 3})"


def _cause(group: LateGroup) -> str:
    first = group.actions[0]
    if first.cause is Cause.LATE_RECEIVE and first.waits_for is not None:
        sender = f"late receive from stage {first.waits_for.stage}"
        if first.origin is None:
            return sender
        return f"{sender}; lost at {_WORK[first.origin.kind]} of stage {first.origin.stage}, rank {first.origin_rank}"
    if first.cause is Cause.SLOW_TRANSFER and first.waits_for is not None:
        return f"slow transfer: the message of stage {first.waits_for.stage} had been made and was long on its way"
    if first.cause is Cause.HOST_BOUND:
        return "host-bound: the input was there, and the host was not ready"
    if first.cause is Cause.SLOW_STAGE:
        return "slow stage: it always takes longer than planned"
    return "slow this time: it usually takes as long as planned"


def _advice(advice: Advice) -> Iterator[str]:
    """The schedule as it is, Auto, the best of the others within the same memory, and the fastest of all."""
    current, rows = advice.current, [advice.auto, advice.best_named, advice.fastest]
    yield f"    {current.name:<22}{duration(current.step):>9}   {_held(current)}, as it is"
    shown = {current.name}
    for each in rows:
        if each is None or each.name in shown:
            continue
        shown.add(each.name)
        gain = advice.gain(each)
        difference = (
            f"{gain:.1%} less" if gain >= 0.0005 else f"{-gain:.1%} more" if gain < -0.0005 else "the same"
        )
        yield f"    {each.name:<22}{duration(each.step):>9}   {_held(each)}, {difference}"


def _held(candidate: Candidate) -> str:
    return f"{candidate.peak_share:.3g} microbatches of activations held"
