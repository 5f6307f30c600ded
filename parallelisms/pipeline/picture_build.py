"""Makes the picture of a plan, or of what was measured below what was planned, on the same scale."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parallelisms.pipeline.actions import Action, Kind
from parallelisms.pipeline.costs import exposed_in_prediction, exposed_transfers
from parallelisms.pipeline.factory import PipelineSchedule
from parallelisms.pipeline.figures import Figures, measured_figures, predicted_figures
from parallelisms.pipeline.measured import MeasuredAction, RankMeasurement, Timeline
from parallelisms.pipeline.picture import Box, Lane, Look, Panel, Picture, duration
from parallelisms.pipeline.setting import Placement
from parallelisms.pipeline.simulate import Prediction

_LOOKS = {
    Kind.FORWARD: Look.FORWARD,
    Kind.BACKWARD: Look.BACKWARD,
    Kind.BACKWARD_INPUT: Look.INPUT_GRADIENT,
    Kind.BACKWARD_WEIGHT: Look.WEIGHT_GRADIENT,
}
_SHARDING = (Kind.UNSHARD, Kind.REDUCE_GRADIENT)


def picture_of_plan(schedule: PipelineSchedule) -> Picture:
    """The planned timeline of a schedule, in the unit of its costs."""
    placement = schedule.placement
    panel = _planned(schedule.prediction, placement, "planned", schedule.microbatches)
    return Picture(
        schedule.name,
        _subtitle(placement, schedule.microbatches, 1),
        (panel,),
        seconds=False,
        levels=max(panel.figures.stages),
    )


def picture_of_plans(schedules: tuple[PipelineSchedule, ...], title: str) -> Picture:
    """Several schedules below each other on one scale. Their costs must be in one unit."""
    panels = tuple(
        _planned(each.prediction, each.placement, each.name, each.microbatches) for each in schedules
    )
    ranks = {each.placement.ranks for each in schedules}
    microbatches = {each.microbatches for each in schedules}
    shown = []
    if len(ranks) == 1:
        shown.append(_counted(ranks.pop(), "rank", "ranks"))
    if len(microbatches) == 1:
        shown.append(_counted(microbatches.pop(), "microbatch", "microbatches"))
    levels = max(max(panel.figures.stages) for panel in panels)
    return Picture(title, ", ".join(shown), panels, seconds=False, levels=levels)


def picture_of_timeline(timeline: Timeline, replica: int = 0) -> Picture:
    """The measured timeline of one pipeline below the planned one. Raises ValueError if there is none such."""
    schedule = timeline.schedule
    ranks = timeline.pipeline(replica)
    placement = schedule.placement
    # The plan begins when the first rank began to compute.
    begin = min((rank.compute[0].start for rank in ranks if rank.compute), default=0.0)
    names = [f"rank {rank.rank}" for rank in ranks]
    planned = _planned(timeline.plan(), placement, "planned", schedule.microbatches, begin, names)
    figures = measured_figures(timeline, replica)
    exposed = {(each.action, each.run): each.seconds for each in exposed_transfers(timeline, ranks)}
    lanes = tuple(
        _measured_lane(rank, placement, figures, exposed, position) for position, rank in enumerate(ranks)
    )
    note = f"times of two ranks may be off by {duration(timeline.clock_bound)}"
    return Picture(
        f"{schedule.name}, step {timeline.step}",
        _subtitle(placement, schedule.microbatches, schedule.runs),
        (planned, Panel("measured", lanes, figures, note, measured=True)),
        seconds=True,
        levels=max(figures.stages),
    )


def _subtitle(placement: Placement, microbatches: int, runs: int) -> str:
    parts = [
        _counted(placement.ranks, "rank", "ranks"),
        _counted(placement.stages, "stage", "stages"),
        _counted(microbatches, "microbatch", "microbatches"),
    ]
    if runs > 1:
        parts.append(f"{runs} accumulated")
    return ", ".join(parts)


def _counted(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _planned(
    prediction: Prediction,
    placement: Placement,
    title: str,
    microbatches: int,
    begin: float = 0.0,
    names: Sequence[str] | None = None,
) -> Panel:
    figures = predicted_figures(prediction, placement)
    exposed = exposed_in_prediction(prediction, placement)
    lanes = []
    for rank, spans in enumerate(prediction.spans):
        level = _levels(placement, rank)
        boxes = tuple(
            Box(
                _LOOKS[span.action.kind],
                begin + span.start,
                begin + span.end,
                _label(span.action, microbatches),
                level[span.action.stage],
                f"{span.action}: {span.start:.6g} to {span.end:.6g}",
            )
            for span in spans
        )
        late = [exposed.get(span.action, 0.0) for span in spans]
        waits = tuple(_gaps(boxes, late, begin, begin + prediction.step))
        name = f"rank {rank}" if names is None else names[rank]
        lanes.append(_lane(name, boxes, waits, figures, rank))
    return Panel(title, tuple(lanes), figures)


def _gaps(boxes: tuple[Box, ...], exposed: list[float], begin: float, end: float) -> Iterator[Box]:
    """Where a rank computes nothing between the begin and the end of the step.

    `exposed` is for how long each box waited for a message that had been made.
    """
    least = 1e-6 * (end - begin)
    for box, on_its_way in zip(boxes, exposed, strict=True):
        if box.start - begin > least:
            yield from _wait(begin, box.start, on_its_way, "idle")
        begin = box.end
    if end - begin > least:
        yield Box(Look.WAITING, begin, end, text="idle")


def _wait(start: float, end: float, on_its_way: float, text: str) -> list[Box]:
    """The boxes of a wait, whose last part is communication."""
    made = max(start, end - on_its_way)
    parts = []
    if made > start:
        parts.append(Box(Look.WAITING, start, made, text=text))
    if end > made:
        parts.append(Box(Look.COMMUNICATION, made, end, text=text))
    return parts


def _measured_lane(
    rank: RankMeasurement,
    placement: Placement,
    figures: Figures,
    exposed: dict[tuple[Action, int], float],
    position: int,
) -> Lane:
    level = _levels(placement, rank.pipeline_rank)
    boxes: list[Box] = []
    waits: list[Box] = []
    for each in rank.actions:
        kind = each.action.kind
        if kind.is_compute:
            boxes.append(
                Box(
                    _LOOKS[kind],
                    each.start,
                    each.end,
                    _label(each.action),
                    level[each.action.stage],
                    _told(each),
                )
            )
        elif kind in _SHARDING:
            boxes.append(
                Box(Look.COMMUNICATION, each.start, each.end, "", level[each.action.stage], _told(each))
            )
        if each.wait_start is not None and each.wait_end is not None:
            on_its_way = exposed.get((each.action, each.run), 0.0)
            waits += _wait(each.wait_start, each.wait_end, on_its_way, _waited(each, on_its_way))
    return _lane(f"rank {rank.rank}", tuple(boxes), tuple(waits), figures, position)


def _lane(
    name: str,
    boxes: tuple[Box, ...],
    waits: tuple[Box, ...],
    figures: Figures,
    position: int,
) -> Lane:
    return Lane(
        name,
        boxes,
        waits,
        figures.rank_bubbles[position],
        figures.peak_shares[position],
    )


def _levels(placement: Placement, rank: int) -> dict[int, int]:
    return {stage: level for level, stage in enumerate(placement.stages_of(rank))}


def _label(action: Action, microbatches: int | None = None) -> str:
    """The microbatch within its run (`microbatches` long, if they are counted through), and the chunk of it."""
    if action.microbatch is None:
        return ""
    microbatch = action.microbatch if microbatches is None else action.microbatch % microbatches
    return str(microbatch) if action.chunk is None else f"{microbatch}.{action.chunk}"


def _told(each: MeasuredAction) -> str:
    waited = f", waited {duration(each.waited)} before" if each.waited > 0 else ""
    return f"{each.action}: {duration(each.seconds)} from {duration(each.start)}{waited}"


def _waited(each: MeasuredAction, on_its_way: float) -> str:
    peer = "" if each.peer is None else f" with rank {each.peer}"
    made = (
        f", the last {duration(on_its_way)} of it after the message had been made" if on_its_way > 0 else ""
    )
    return f"{each.action} waits {duration(each.waited)} for {each.waits_for}{peer}{made}"
