"""The picture of a timeline as data: ranks down, time across. `picture_svg` and `picture_text` draw it.

picture_of_plan(schedule)          what will be done
picture_of_timeline(timeline)      what was done, below what was planned, on the same scale
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from parallelisms.pipeline.figures import Figures


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
    """One rank: what it did in `boxes`, and when it stood still in `waits`.

    Of a wait, the last part is communication if the message had been made by then and was on its way.
    """

    name: str
    boxes: tuple[Box, ...]
    waits: tuple[Box, ...]
    bubble: float
    peak_share: float


@dataclass(frozen=True)
class Panel:
    """The lanes of one pipeline, planned or measured."""

    title: str
    lanes: tuple[Lane, ...]
    figures: Figures
    note: str = ""
    measured: bool = False


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
        return max((box.end for box in self._all()), default=0.0)

    @property
    def looks(self) -> tuple[Look, ...]:
        """What occurs in it, in the order of the legend."""
        found = {box.look for box in self._all()}
        return tuple(look for look in Look if look in found)

    def levels_of(self, look: Look) -> tuple[int, ...]:
        """Which of a rank's stages do what the look stands for."""
        return tuple(sorted({box.level for box in self._all() if box.look is look}))

    def _all(self) -> Iterator[Box]:
        for panel in self.panels:
            for lane in panel.lanes:
                yield from lane.boxes
                yield from lane.waits


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
