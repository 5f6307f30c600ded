"""What differs from the plan, as lines for a terminal: the second half of `stageline timeline RUN_FOLDER`."""

from __future__ import annotations

from collections.abc import Iterator

from parallelisms.pipeline.actions import Kind
from parallelisms.pipeline.advice import Advice, Candidate, advise
from parallelisms.pipeline.comparison import Cause, Comparison, LateAction, StageCost, compare
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
    yield "With the costs just measured"
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
    shown = comparison.late[:_MOST_ROWS]
    yield f"  late actions (more than {duration(comparison.threshold)} lost at them), most lost first:"
    yield f"    {'action':<9}{'rank':>5}{'lost here':>12}{'late by':>12}  cause"
    for each in shown:
        run = f" (run {each.run})" if each.run else ""
        yield (
            f"    {each.action!s:<9}{each.rank:>5}{duration(each.lost):>12}{duration(each.late):>12}"
            f"  {_cause(each)}{run}"
        )
    if len(comparison.late) > len(shown):
        yield f"    and {len(comparison.late) - len(shown)} more"
    totals = ", ".join(
        f"{cause.value} {duration(lost)}" for cause, lost in comparison.lost_by_cause().items()
    )
    yield f"  lost over all ranks: {totals}"


def _cause(late: LateAction) -> str:
    if late.cause is Cause.LATE_RECEIVE and late.waits_for is not None:
        origin = (
            f"; time was lost at {late.origin} on rank {late.origin_rank}" if late.origin is not None else ""
        )
        return f"late receive: {late.waits_for} came late{origin}"
    if late.cause is Cause.SLOW_TRANSFER and late.waits_for is not None:
        return f"slow transfer: the message of {late.waits_for} was long on its way"
    if late.cause is Cause.HOST_BOUND:
        return "host-bound: its input was there, and the host was not ready"
    return late.cause.value


def _advice(advice: Advice) -> Iterator[str]:
    current, best, fastest = advice.current, advice.best, advice.fastest
    yield f"  {_candidate(current)}, as it is"
    if best is not current:
        yield f"  {_candidate(best)}: {advice.gain(best):.1%} less, with no more memory"
    if fastest.step < best.step:
        yield f"  {_candidate(fastest)}: {advice.gain(fastest):.1%} less, with more memory"
    if best is current and fastest is current:
        yield "  no other schedule over these stages would be faster"


def _candidate(candidate: Candidate) -> str:
    return (
        f"{candidate.name}: predicted step {duration(candidate.step)}, "
        f"{candidate.peak_share:.3g} microbatches of activations held"
    )
