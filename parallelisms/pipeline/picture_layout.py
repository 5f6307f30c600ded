"""Where everything stands in the picture, in pixels: from the number of ranks and the shortest boxes."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, log10

from parallelisms.pipeline.picture import Box, Look, Panel, Picture

# In pixels of a picture of common width; wider ones have everything larger (`Layout.zoom`), so that they can
# still be read when they are shown at the width of a page.
_MARGIN = 24.0
_NAMES = 62.0  # the column of rank names
_TABLE = 132.0  # the columns of figures of each rank
_HEAD = 100.0  # title and legend
_PANEL_HEAD = 68.0  # title and figures of a panel
_AXIS = 26.0
_PANEL_GAP = 16.0
_FOOT = 40.0
_COMMON_WIDTH = 960.0  # of the plot
_WIDEST = 4600.0
_LARGEST_ZOOM = 2.8

_DIGIT = 0.6  # width of a digit against the size of the font
_SMALLEST_FONT = 6.5


@dataclass(frozen=True)
class Layout:
    """Sizes of one picture."""

    zoom: float  # of everything but the plot
    plot_width: float
    row: float  # height of a lane
    pitch: float  # from lane to lane
    font: float  # of labels in boxes
    scale: float  # pixels for each unit of time
    panel_tops: tuple[float, ...]
    height: float

    @property
    def margin(self) -> float:
        return _MARGIN * self.zoom

    @property
    def left(self) -> float:
        """Where time 0 stands."""
        return (_MARGIN + _NAMES) * self.zoom

    @property
    def right(self) -> float:
        """Where the plot ends."""
        return self.left + self.plot_width

    @property
    def width(self) -> float:
        return self.right + (_TABLE + _MARGIN) * self.zoom

    def x(self, time: float) -> float:
        return self.left + time * self.scale

    def lanes_top(self, panel: int) -> float:
        return self.panel_tops[panel] + _PANEL_HEAD * self.zoom

    def lane_top(self, panel: int, lane: int) -> float:
        return self.lanes_top(panel) + lane * self.pitch

    def axis(self, panel: int, lanes: int) -> float:
        """Where the axis of a panel stands."""
        return self.lanes_top(panel) + lanes * self.pitch

    def fits(self, box: Box) -> bool:
        """Whether the label of a box fits into it."""
        width = (box.end - box.start) * self.scale
        return bool(box.label) and len(box.label) * _DIGIT * self.font + 1.5 <= width and self.row >= 9


def lay_out(picture: Picture) -> Layout:
    """Wide enough that microbatch numbers fit, and no wider than is good to look at."""
    length = picture.length or 1.0
    narrow = narrow_box(picture) or length
    units = length / narrow
    width = max(720.0, min(28 * units, _COMMON_WIDTH), min(11.5 * units, _WIDEST))
    zoom = min(_LARGEST_ZOOM, max(1.0, width / _COMMON_WIDTH * 0.64))
    row, gap = _row(max(len(panel.lanes) for panel in picture.panels))
    pitch = (row + gap) * zoom
    tops, top = [], _HEAD * zoom
    for panel in picture.panels:
        tops.append(top)
        top += _panel_height(panel, pitch, zoom)
    scale = width / length
    return Layout(
        zoom=zoom,
        plot_width=width,
        row=row * zoom,
        pitch=pitch,
        font=_font(picture, narrow * scale, row * zoom),
        scale=scale,
        panel_tops=tuple(tops),
        height=top + (_FOOT - _PANEL_GAP) * zoom,
    )


def _panel_height(panel: Panel, pitch: float, zoom: float) -> float:
    return len(panel.lanes) * pitch + (_PANEL_HEAD + _AXIS + _PANEL_GAP) * zoom


def _row(lanes: int) -> tuple[float, float]:
    """Height of a lane and the gap below it."""
    for most, row, gap in ((4, 32.0, 7.0), (8, 27.0, 6.0), (16, 21.0, 5.0), (32, 15.0, 4.0)):
        if lanes <= most:
            return row, gap
    return 9.0, 2.0


def compute_boxes(picture: Picture) -> list[Box]:
    """What the ranks compute in the planned panels: measured boxes may be as short as they like."""
    return [
        box
        for panel in picture.panels
        if not panel.measured
        for lane in panel.lanes
        for box in lane.boxes
        if box.look is not Look.COMMUNICATION
    ]


def narrow_box(picture: Picture) -> float:
    """The duration of the shorter planned boxes; a tenth is shorter still."""
    durations = sorted(box.end - box.start for box in compute_boxes(picture) if box.end > box.start)
    return durations[len(durations) // 10] if durations else 0.0


def _font(picture: Picture, narrow: float, row: float) -> float:
    """As large as the narrow boxes allow, if they allow a readable one at all."""
    largest = min(13.0, row * 0.5)
    digits = max((len(box.label) for box in compute_boxes(picture)), default=1)
    fitting = (narrow - 1.5) / (max(digits, 1) * _DIGIT)
    return min(largest, fitting) if fitting >= _SMALLEST_FONT else min(largest, 9.0)


def ticks(length: float, most: int = 12) -> list[float]:
    """Round times from 0 to `length`."""
    if length <= 0:
        return [0.0]
    raw = length / most
    power = 10.0 ** floor(log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    return [step * index for index in range(int(length / step + 1e-9) + 1)]
