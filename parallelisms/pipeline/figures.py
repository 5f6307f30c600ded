"""The figures of a step beside its picture: of a prediction, and of what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallelisms.pipeline.actions import Kind
from parallelisms.pipeline.bounds import lower_bound
from parallelisms.pipeline.costs import exposed_in_prediction, exposed_transfers, measured_costs
from parallelisms.pipeline.measured import RankMeasurement, Timeline
from parallelisms.pipeline.setting import Placement
from parallelisms.pipeline.simulate import Prediction, Span
from parallelisms.pipeline.verify import peak_activations

_SHARDING = (Kind.UNSHARD, Kind.REDUCE_GRADIENT)


@dataclass(frozen=True)
class Figures:
    """Of one pipeline and one step; times in the unit of the spans, tuples by pipeline rank.

    Attributes:
        step: from the first start to the last end of any compute action.
        bound: the lower bound on the step for these stages and costs.
        step_bubble: the share of ranks x step in which nothing was computed.
        rank_bubbles: the idle share between a rank's own first start and last end.
        waiting: how long each rank stood still for messages.
        exposed: communication that held a rank up: messages from when they were made, gathering and reducing.
        peak_activations: held at once, of single stages.
        stages: how many stages each rank has.
    """

    step: float
    bound: float
    step_bubble: float
    rank_bubbles: tuple[float, ...]
    waiting: tuple[float, ...]
    exposed: tuple[float, ...]
    peak_activations: tuple[int, ...]
    stages: tuple[int, ...]

    @property
    def peak_shares(self) -> tuple[float, ...]:
        """Peak activations in microbatches of the rank's whole share."""
        return tuple(
            peak / max(count, 1) for peak, count in zip(self.peak_activations, self.stages, strict=True)
        )


def predicted_figures(prediction: Prediction, placement: Placement) -> Figures:
    """The figures of a prediction."""
    late = exposed_in_prediction(prediction, placement)
    exposed = [sum(late.get(span.action, 0.0) for span in spans) for spans in prediction.spans]
    waiting = [_idle_before_spans(spans) for spans in prediction.spans]
    return Figures(
        prediction.step,
        prediction.bound,
        prediction.step_bubble,
        prediction.rank_bubbles,
        tuple(waiting),
        tuple(exposed),
        prediction.peak_activations,
        _stages(placement, len(prediction.spans)),
    )


def _idle_before_spans(spans: Sequence[Span]) -> float:
    """From the start of the step to the last end, what is not computed."""
    return spans[-1].end - sum(span.end - span.start for span in spans) if spans else 0.0


def measured_figures(timeline: Timeline, replica: int) -> Figures:
    """The figures of one pipeline of a timeline. The bound is for the costs that were measured in it."""
    ranks = timeline.pipeline(replica)
    placement = timeline.schedule.placement
    computed = [rank.compute for rank in ranks]
    first = min((each[0].start for each in computed if each), default=0.0)
    last = max((each[-1].end for each in computed if each), default=0.0)
    busy = [sum(one.seconds for one in each) for each in computed]
    lengths = [each[-1].end - each[0].start if each else 0.0 for each in computed]
    costs = measured_costs(timeline)
    split = any(one.action.kind is Kind.BACKWARD_INPUT for each in computed for one in each)
    runs = timeline.schedule.microbatches * timeline.schedule.runs
    transfers = exposed_transfers(timeline, ranks)
    return Figures(
        step=last - first,
        # Costs are means; what is only known on average may come out above what happened.
        bound=min(lower_bound(placement, costs, runs, split), last - first),
        step_bubble=_idle(sum(busy), (last - first) * len(ranks)),
        rank_bubbles=tuple(_idle(work, length) for work, length in zip(busy, lengths, strict=True)),
        waiting=tuple(sum(each.waited for each in rank.actions) for rank in ranks),
        exposed=tuple(
            _sharding(rank) + sum(each.seconds for each in transfers if each.rank == rank.rank)
            for rank in ranks
        ),
        peak_activations=tuple(peak_activations(tuple(one.action for one in rank.compute)) for rank in ranks),
        stages=_stages(placement, len(ranks)),
    )


def _sharding(rank: RankMeasurement) -> float:
    return sum(each.seconds for each in rank.actions if each.action.kind in _SHARDING)


def _idle(busy: float, length: float) -> float:
    return max(0.0, 1.0 - busy / length) if length > 0 else 0.0


def _stages(placement: Placement, ranks: int) -> tuple[int, ...]:
    return tuple(len(placement.stages_of(rank)) for rank in range(ranks))
