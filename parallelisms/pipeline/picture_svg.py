"""Draws a picture as SVG: one file that needs nothing else, for light and dark, on screen and in print."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from html import escape

from parallelisms.pipeline.picture import Box, Lane, Look, Picture, duration, figure_texts
from parallelisms.pipeline.picture_colours import Theme, pattern_of, patterns, style
from parallelisms.pipeline.picture_layout import Layout, lay_out, ticks

_FOOTNOTE = (
    "bubble: of a rank, the idle share between its first start and its last end; of the step, that of all ranks "
    "over the whole step. peak: activations held at once, in microbatches of the rank's share."
)
_STAGED = (Look.FORWARD, Look.BACKWARD, Look.INPUT_GRADIENT, Look.WEIGHT_GRADIENT)
_COLUMNS = ((60.0, "bubble"), (116.0, "peak"))  # beside the lanes: where they end, and their heads


def draw_svg(picture: Picture, theme: Theme = "auto") -> str:
    """The picture as an SVG document.

    With the theme "auto" it follows the reader's preference, where the viewer knows it, and is light elsewhere.
    Several may stand in one page: their styles and identities do not meet.
    """
    return _Drawing(picture, theme).document()


class _Drawing:
    def __init__(self, picture: Picture, theme: Theme) -> None:
        self._picture = picture
        self._theme = theme
        self._layout: Layout = lay_out(picture)
        self._zoom = self._layout.zoom
        # The same picture always has the same identity, so that drawing it again changes nothing.
        text = f"{theme}{picture!r}"
        self._id = "timeline-" + hashlib.sha256(text.encode()).hexdigest()[:8]

    def document(self) -> str:
        width, height = f"{self._layout.width:.0f}", f"{self._layout.height:.0f}"
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" id="{self._id}" role="img" '
                f'viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
                f"<title>{escape(self._picture.title)}: {escape(self._picture.subtitle)}</title>",
                f"<style>{style(self._id, self._theme, self._picture.levels)}</style>",
                "<defs>",
                *patterns(self._id, self._picture.levels, self._zoom),
                "</defs>",
                f'<rect class="bg" width="{width}" height="{height}"/>',
                *self._header(),
                *(part for index in range(len(self._picture.panels)) for part in self._panel(index)),
                self._footer(),
                "</svg>\n",
            ]
        )

    # Header and footer

    def _header(self) -> Iterator[str]:
        zoom, x = self._zoom, self._layout.margin
        yield self._text(x, 37 * zoom, self._picture.title, "ink", 19, weight=600)
        yield self._text(x, 57 * zoom, self._picture.subtitle, "mut", 12.5)
        for look in self._picture.looks:
            levels = self._picture.levels_of(look) if look in _STAGED else (0,)
            for level in levels:
                yield self._swatch(x, 72 * zoom, look, level)
                x += 24 * zoom
            yield self._text(x + 5 * zoom, 83 * zoom, look.value, "ink", 12)
            x += (6.3 * len(look.value) + 24) * zoom
        if self._picture.levels > 1:
            yield self._text(x, 83 * zoom, "paler: a rank's later stages", "mut", 12)

    def _swatch(self, x: float, y: float, look: Look, level: int) -> str:
        zoom = self._zoom
        return (
            f'<rect x="{x:g}" y="{y:g}" width="{22 * zoom:g}" height="{14 * zoom:g}" rx="{2.5 * zoom:g}" '
            f'fill="url(#{self._id}-{pattern_of(look, level)})"/>'
        )

    def _footer(self) -> str:
        y = self._layout.height - 16 * self._zoom
        return self._text(self._layout.margin, y, _FOOTNOTE, "mut", 10.5)

    # Panels

    def _panel(self, index: int) -> Iterator[str]:
        panel, layout = self._picture.panels[index], self._layout
        y = layout.panel_tops[index] + 17 * self._zoom
        yield self._text(layout.margin, y, panel.title, "ink", 14.5, weight=600)
        if panel.note:
            yield self._text(layout.right, y, panel.note, "mut", 10.5, anchor="end")
        yield from self._figures(index)
        yield from self._axis(index)
        for position, lane in enumerate(panel.lanes):
            yield from self._lane(lane, layout.lane_top(index, position))
        yield from self._bound(index)

    def _figures(self, index: int) -> Iterator[str]:
        zoom, x, top = self._zoom, self._layout.left, self._layout.panel_tops[index]
        for name, value in figure_texts(self._picture.panels[index].figures, self._picture.seconds):
            yield self._text(x, top + 36 * zoom, name, "mut", 10.5)
            yield self._text(x, top + 51 * zoom, value, "ink", 13, weight=600)
            x += (max(5.8 * len(name), 8.0 * len(value)) + 20) * zoom
        for offset, name in _COLUMNS:
            right = self._layout.right + offset * zoom
            yield self._text(right, top + 51 * zoom, name, "mut", 10.5, anchor="end")

    def _axis(self, index: int) -> Iterator[str]:
        layout, zoom = self._layout, self._zoom
        top = layout.lanes_top(index)
        bottom = layout.axis(index, len(self._picture.panels[index].lanes))
        for time in ticks(self._picture.length):
            x = layout.x(time)
            yield f'<path class="grid" d="M{x:.1f},{top - 4:.1f} V{bottom + 3 * zoom:.1f}"/>'
            yield self._text(x, bottom + 15 * zoom, self._time(time), "mut", 10.5, anchor="middle")

    def _lane(self, lane: Lane, top: float) -> Iterator[str]:
        layout = self._layout
        size = min(12.5, max(8.0, layout.row / self._zoom * 0.55))
        baseline = top + layout.row / 2 + size * 0.35 * self._zoom
        yield (
            f'<rect class="lane" x="{layout.left:g}" y="{top:g}" width="{layout.plot_width:g}" '
            f'height="{layout.row:g}"/>'
        )
        yield self._text(layout.left - 10 * self._zoom, baseline, lane.name, "ink", size, anchor="end")
        yield from self._boxes(lane.waits, top, layout.row)
        yield from self._boxes(lane.boxes, top, layout.row)
        for (offset, _), value in zip(
            _COLUMNS, (f"{lane.bubble:.1%}", f"{lane.peak_share:.3g}"), strict=True
        ):
            yield self._text(layout.right + offset * self._zoom, baseline, value, "ink", size, anchor="end")

    def _boxes(self, boxes: tuple[Box, ...], top: float, height: float) -> Iterator[str]:
        """Boxes of one look and level stand together, so that the fill is said once; then the labels."""
        groups: dict[tuple[Look, int], list[Box]] = {}
        for box in boxes:
            groups.setdefault((box.look, box.level), []).append(box)
        for (look, level), members in groups.items():
            name = pattern_of(look, level)
            yield f'<g fill="url(#{self._id}-{name})">'
            yield from (self._rectangle(box, top, height) for box in members)
            yield "</g>"
            labelled = [box for box in members if self._layout.fits(box)]
            if labelled:
                yield from self._labels(labelled, f"{name}t", top + height / 2)

    def _labels(self, boxes: list[Box], name: str, middle: float) -> Iterator[str]:
        font = self._layout.font
        # The edge in the colour of the box keeps the digits apart from the lines of its pattern.
        yield (
            f'<g class="{name}" font-size="{font:.1f}" font-weight="500" text-anchor="middle" '
            f'stroke-width="{font / 3.2:.1f}" stroke-linejoin="round" paint-order="stroke">'
        )
        for box in boxes:
            x = self._layout.x((box.start + box.end) / 2)
            yield f'<text x="{x:.1f}" y="{middle + font * 0.35:.1f}">{escape(box.label)}</text>'
        yield "</g>"

    def _rectangle(self, box: Box, top: float, height: float) -> str:
        x, width = self._layout.x(box.start), (box.end - box.start) * self._layout.scale
        # A hair between neighbours; nothing ever vanishes.
        gap = 0.0 if box.look is Look.WAITING else min(1.0, width * 0.12)
        radius = min(2.5 * self._zoom, width / 4, height / 4)
        told = f"<title>{escape(box.text)}</title>" if box.text else ""
        return (
            f'<rect x="{x + gap / 2:.2f}" y="{top:g}" width="{max(width - gap, 0.3):.2f}" '
            f'height="{height:g}" rx="{radius:.1f}">{told}</rect>'
        )

    def _bound(self, index: int) -> Iterator[str]:
        """Where the step would end at the earliest."""
        panel, layout, zoom = self._picture.panels[index], self._layout, self._zoom
        begin = min((box.start for lane in panel.lanes for box in lane.boxes), default=0.0)
        x = layout.x(begin + panel.figures.bound)
        if panel.figures.bound <= 0 or x > layout.right + 1:
            return
        top, bottom = layout.lanes_top(index) - 5 * zoom, layout.axis(index, len(panel.lanes)) + zoom
        yield (
            f'<path class="mark" d="M{x:.1f},{top:.1f} V{bottom:.1f}" stroke-width="{1.2 * zoom:g}" '
            f'stroke-dasharray="{3 * zoom:g} {2.5 * zoom:g}"/>'
        )
        yield self._text(x - 4 * zoom, top + 2 * zoom, "bound", "mut", 10, anchor="end")

    def _time(self, time: float) -> str:
        return duration(time) if self._picture.seconds and time > 0 else f"{time:.6g}"

    def _text(
        self,
        x: float,
        y: float,
        text: str,
        name: str,
        size: float,
        *,
        anchor: str = "start",
        weight: int = 400,
    ) -> str:
        """`x` and `y` in pixels, `size` before zooming."""
        anchored = "" if anchor == "start" else f' text-anchor="{anchor}"'
        heavy = "" if weight == 400 else f' font-weight="{weight}"'
        return (
            f'<text class="{name}" x="{x:.1f}" y="{y:.1f}" font-size="{size * self._zoom:g}"{anchored}{heavy}>'
            f"{escape(text)}</text>"
        )
