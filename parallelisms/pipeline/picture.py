"""The picture of a timeline as data: ranks down, time across. `picture_svg` and `picture_text` draw it.

picture_of_plan(schedule)          what will be done
picture_of_timeline(timeline)      what was done, below what was planned, on the same scale
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from parallelisms.pipeline.actions import Action, Kind
from parallelisms.pipeline.factory import PipelineSchedule
from parallelisms.pipeline.figures import Figures, measured_figures, predicted_figures
from parallelisms.pipeline.measured import MeasuredAction, RankMeasurement, Timeline
from parallelisms.pipeline.setting import Placement
from parallelisms.pipeline.simulate import Prediction


class Look(Enum):
    """What a box stands for; the value is its name in the legend."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT_GRADIENT = "input gradient"
    WEIGHT_GRADIENT = "weight gradient"
    COMMUNICATION = "communication"
    WAITING = "waiting"

    @property
    def letter(self) -> str:
        """As in the text of actions; communication is `C`."""
        return _LETTERS[self]


_LETTERS = {
    Look.FORWARD: "F",
    Look.BACKWARD: "B",
    Look.INPUT_GRADIENT: "I",
    Look.WEIGHT_GRADIENT: "W",
    Look.COMMUNICATION: "C",
    Look.WAITING: "·",
}
_LOOKS = {
    Kind.FORWARD: Look.FORWARD,
    Kind.BACKWARD: Look.BACKWARD,
    Kind.BACKWARD_INPUT: Look.INPUT_GRADIENT,
    Kind.BACKWARD_WEIGHT: Look.WEIGHT_GRADIENT,
}
_SHARDING = (Kind.UNSHARD, Kind.REDUCE_GRADIENT)


@dataclass(frozen=True, slots=True)
class Box:
    """Something that takes time on a rank.

    Attributes:
        look: what it stands for.
        start, end: in the unit of the picture.
        label: the microbatch, or nothing.
        level: which of the rank's stages, from 0 for its first.
        text: the whole truth, for who asks.
    """

    look: Look
    start: float
    end: float
    label: str = ""
    level: int = 0
    text: str = ""


@dataclass(frozen=True)
class Lane:
    """One rank: what it did in `boxes`, when it stood still in `waits`, messages on their way in `messages`."""

    name: str
    boxes: tuple[Box, ...]
    waits: tuple[Box, ...]
    messages: tuple[Box, ...]
    bubble: float
    peak_share: float
    peak_activations: int


@dataclass(frozen=True)
class Panel:
    """The lanes of one pipeline, planned or measured; its time begins at `start` of the picture's."""

    title: str
    lanes: tuple[Lane, ...]
    figures: Figures
    note: str = ""


@dataclass(frozen=True)
class Picture:
    """Panels on one scale. `seconds` tells that times are seconds, and otherwise in the unit of the costs."""

    title: str
    subtitle: str
    panels: tuple[Panel, ...]
    seconds: bool
    levels: int  # stages of the fullest rank

    @property
    def length(self) -> float:
        """The end of the last box."""
        ends = [
            box.end
            for panel in self.panels
            for lane in panel.lanes
            for boxes in (lane.boxes, lane.waits, lane.messages)
            for box in boxes
        ]
        return max(ends, default=0.0)

    @property
    def looks(self) -> tuple[Look, ...]:
        """What occurs in it, in the order of the legend."""
        found = {
            box.look
            for panel in self.panels
            for lane in panel.lanes
            for boxes in (lane.boxes, lane.waits, lane.messages)
            for box in boxes
        }
        return tuple(look for look in Look if look in found)


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
    microbatches = {each.microbatches for each in schedules}
    shown = f"{microbatches.pop()} microbatches" if len(microbatches) == 1 else ""
    levels = max(max(panel.figures.stages) for panel in panels)
    return Picture(title, shown, panels, seconds=False, levels=levels)


def picture_of_timeline(timeline: Timeline, replica: int = 0) -> Picture:
    """The measured timeline of one pipeline below the planned one. Raises ValueError if there is none such."""
    schedule = timeline.schedule
    ranks = timeline.pipeline(replica)
    placement = schedule.placement
    # The plan begins when the first rank began to compute.
    begin = min((rank.compute[0].start for rank in ranks if rank.compute), default=0.0)
    planned = _planned(timeline.plan(), placement, "planned", schedule.microbatches, begin)
    figures = measured_figures(timeline, replica)
    lanes = tuple(_measured_lane(rank, placement, figures, position) for position, rank in enumerate(ranks))
    note = f"times of two ranks may be off by {duration(timeline.clock_bound)}"
    return Picture(
        f"{schedule.name}, step {timeline.step}",
        _subtitle(placement, schedule.microbatches, schedule.runs),
        (planned, Panel("measured", lanes, figures, note)),
        seconds=True,
        levels=max(figures.stages),
    )


def duration(seconds: float) -> str:
    """A time for reading: 12.3 ms."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 1 or unit == "µs":
            return f"{seconds * factor:.3g} {unit}"
    raise AssertionError("unreachable")


def figure_texts(figures: Figures, seconds: bool) -> list[tuple[str, str]]:
    """The figures of a panel for reading, each with its name. Times over ranks are means."""

    def time(value: float) -> str:
        return duration(value) if seconds else f"{value:.4g}"

    ranks = max(len(figures.rank_bubbles), 1)
    low, high = min(figures.rank_bubbles, default=0.0), max(figures.rank_bubbles, default=0.0)
    within = f"{low:.1%}" if f"{low:.1%}" == f"{high:.1%}" else f"{low:.1%} to {high:.1%}"
    return [
        ("step", time(figures.step)),
        ("bound", time(figures.bound)),
        ("bubble of the step", f"{figures.step_bubble:.1%}"),
        ("bubble of ranks", within),
        ("waiting per rank", time(sum(figures.waiting) / ranks)),
        ("exposed communication per rank", time(sum(figures.exposed) / ranks)),
        ("peak activations", f"{max(figures.peak_shares, default=0.0):.3g} microbatches"),
    ]


def _subtitle(placement: Placement, microbatches: int, runs: int) -> str:
    def counted(number: int, what: str) -> str:
        return f"{number} {what}" if number == 1 else f"{number} {what}s"

    parts = [
        counted(placement.ranks, "rank"),
        counted(placement.stages, "stage"),
        counted(microbatches, "microbatch").replace("microbatchs", "microbatches"),
    ]
    if runs > 1:
        parts.append(f"{runs} accumulated")
    return ", ".join(parts)


def _planned(
    prediction: Prediction, placement: Placement, title: str, microbatches: int, begin: float = 0.0
) -> Panel:
    figures = predicted_figures(prediction, placement)
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
        waits = _gaps(boxes, begin, begin + prediction.step)
        lanes.append(_lane(f"rank {rank}", boxes, waits, (), figures, rank))
    return Panel(title, tuple(lanes), figures)


def _gaps(boxes: tuple[Box, ...], begin: float, end: float) -> tuple[Box, ...]:
    """Where a rank computes nothing between the begin and the end of the step."""
    edges = [begin, *(edge for box in boxes for edge in (box.start, box.end)), end]
    least = 1e-6 * (end - begin)
    return tuple(
        Box(Look.WAITING, start, stop, text="idle")
        for start, stop in zip(edges[::2], edges[1::2], strict=True)
        if stop - start > least
    )


def _measured_lane(rank: RankMeasurement, placement: Placement, figures: Figures, position: int) -> Lane:
    level = _levels(placement, rank.pipeline_rank)
    boxes, waits, messages = [], [], []
    for each in rank.actions:
        kind = each.action.kind
        if kind.is_compute:
            boxes.append(
                Box(
                    _LOOKS[kind],
                    each.start,
                    each.end,
                    str(each.action.microbatch),
                    level[each.action.stage],
                    _told(each),
                )
            )
        elif kind in _SHARDING:
            boxes.append(
                Box(Look.COMMUNICATION, each.start, each.end, "", level[each.action.stage], _told(each))
            )
        elif kind.is_send:
            messages.append(Box(Look.COMMUNICATION, each.start, each.end, text=_told(each)))
        if each.wait_start is not None and each.wait_end is not None:
            waits.append(Box(Look.WAITING, each.wait_start, each.wait_end, text=_waited(each)))
    return _lane(f"rank {rank.rank}", tuple(boxes), tuple(waits), tuple(messages), figures, position)


def _lane(
    name: str,
    boxes: tuple[Box, ...],
    waits: tuple[Box, ...],
    messages: tuple[Box, ...],
    figures: Figures,
    position: int,
) -> Lane:
    return Lane(
        name,
        boxes,
        waits,
        messages,
        figures.rank_bubbles[position],
        figures.peak_shares[position],
        figures.peak_activations[position],
    )


def _levels(placement: Placement, rank: int) -> dict[int, int]:
    return {stage: level for level, stage in enumerate(placement.stages_of(rank))}


def _label(action: Action, microbatches: int) -> str:
    """The microbatch within its run."""
    return "" if action.microbatch is None else str(action.microbatch % microbatches)


def _told(each: MeasuredAction) -> str:
    waited = f", waited {duration(each.waited)} before" if each.waited > 0 else ""
    return f"{each.action}: {duration(each.seconds)} from {duration(each.start)}{waited}"


def _waited(each: MeasuredAction) -> str:
    peer = "" if each.peer is None else f" with rank {each.peer}"
    return f"{each.action} waits {duration(each.waited)} for {each.waits_for}{peer}"
