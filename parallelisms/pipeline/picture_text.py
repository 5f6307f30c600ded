"""Draws a picture as text for a terminal of any width, with colours where it can show them.

    rank 0 F0-F1-F2-F3-..................B0====F4-B1====F5-B2==== ...   27.3%    4

A box begins with the letter of what it is and its microbatch, as far as there is room; small letters stand for
a rank's later stages. Without colours the rest of the box is filled with lines, which differ as well. Where
boxes are narrower than a character, the characters show the kinds of work in their proportions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING

from parallelisms.pipeline.picture import Box, Lane, Look, Panel, Picture, duration, figure_texts
from parallelisms.pipeline.picture_colours import LIGHT, fill, mix, readable_on
from parallelisms.pipeline.picture_layout import compute_boxes, narrow_box, ticks

if TYPE_CHECKING:
    from rich.console import Console

_FILLS = {
    Look.FORWARD: "-",
    Look.BACKWARD: "=",
    Look.INPUT_GRADIENT: "~",
    Look.WEIGHT_GRADIENT: "_",
    Look.COMMUNICATION: "#",
    Look.WAITING: ".",
}
_WAIT = "."
_TABLE = 15  # characters of the two columns beside the lanes
_LEAST_PLOT = 20
_MOST_PER_UNIT = 5  # characters for the shortest boxes: more spread the picture without telling more


@dataclass(frozen=True, slots=True)
class Piece:
    """Some characters of a line, and the box that they belong to, if any."""

    text: str
    box: Box | None = None
    dim: bool = False
    bold: bool = False


def print_picture(picture: Picture, console: Console) -> None:
    """Print it as wide as the console, with its colours if it has any."""
    from rich.text import Text

    coloured = console.color_system is not None and not console.no_color
    for line in text_lines(picture, console.width, coloured):
        text = Text(no_wrap=True, overflow="crop")
        for piece in line:
            text.append(piece.text, _style(piece, picture.levels) if coloured else "")
        console.print(text, highlight=False, markup=False)


def plain_text(picture: Picture, width: int = 100) -> str:
    """The picture without colours."""
    lines = text_lines(picture, width, coloured=False)
    return "\n".join("".join(piece.text for piece in line).rstrip() for line in lines) + "\n"


def text_lines(picture: Picture, width: int, coloured: bool) -> Iterator[list[Piece]]:
    """The lines of the picture, none longer than `width` (60 at least)."""
    width = max(width, 60)
    names = max(len(lane.name) for panel in picture.panels for lane in panel.lanes) + 1
    scale = _Scale.of(picture, max(_LEAST_PLOT, width - names - _TABLE), coloured)
    yield [Piece(picture.title, bold=True), Piece(f"  {picture.subtitle}", dim=True)]
    yield from _legend(picture, coloured, names, width)
    for panel in picture.panels:
        yield []
        yield from _panel(panel, picture, scale, names, width)


def _legend(picture: Picture, coloured: bool, indent: int, width: int) -> Iterator[list[Piece]]:
    entries = [_legend_entry(look, coloured) for look in picture.looks]
    if picture.levels > 1:
        entries.append([Piece("small letters: a rank's later stages", dim=True)])
    line, used = [Piece(" " * indent)], indent
    for entry in entries:
        length = sum(len(piece.text) for piece in entry)
        if used + length > width:
            yield line[:-1]
            line, used = [Piece(" " * indent)], indent
        line += [*entry, Piece("   ")]
        used += length + 3
    yield line[:-1]


def _legend_entry(look: Look, coloured: bool) -> list[Piece]:
    if look is Look.WAITING:
        return [Piece(_WAIT, dim=True), Piece(f" {look.value}")]
    sample = f" {look.letter} " if coloured else look.letter
    return [Piece(sample, Box(look, 0.0, 0.0)), Piece(f" {look.value}")]


def _panel(panel: Panel, picture: Picture, scale: _Scale, names: int, width: int) -> Iterator[list[Piece]]:
    figures = ", ".join(f"{name} {value}" for name, value in figure_texts(panel.figures, picture.seconds))
    for index, line in enumerate(wrap(f"{panel.title}: {figures}", width, subsequent_indent="  ")):
        begins = index == 0
        title = panel.title if begins else ""
        yield [Piece(title, bold=True), Piece(line[len(title) :])]
    head = f"{'':{names + scale.columns}}{'bubble':>8}{'peak':>7}"
    yield [Piece(head, dim=True)]
    for lane in panel.lanes:
        table = f"{lane.bubble:>8.1%}{lane.peak_share:>7.3g}"
        yield [Piece(f"{lane.name:<{names}}"), *scale.draw(lane), Piece(table)]
    yield [Piece(f"{'':{names}}"), Piece(_axis(picture, scale), dim=True)]
    if panel.note:
        yield [Piece(f"{'':{names}}"), Piece(panel.note, dim=True)]


def _axis(picture: Picture, scale: _Scale) -> str:
    line = [" "] * scale.columns
    free = 0
    for time in ticks(picture.length, most=max(2, scale.columns // 10)):
        at = round(time * scale.per_unit)
        label = duration(time) if picture.seconds and time > 0 else f"{time:.6g}"
        if at >= free and at + len(label) <= scale.columns:
            line[at : at + len(label)] = label
            free = at + len(label) + 1
    return "".join(line)


@dataclass(frozen=True)
class _Scale:
    """How time becomes characters."""

    columns: int
    per_unit: float  # characters for each unit of time
    dense: bool  # boxes are narrower than characters
    numbered: bool  # the narrow boxes have room for a letter and a number
    coloured: bool

    @classmethod
    def of(cls, picture: Picture, room: int, coloured: bool) -> _Scale:
        boxes = compute_boxes(picture)
        length = picture.length or 1.0
        narrow = narrow_box(picture) or length
        per_unit = min(room / length, _MOST_PER_UNIT / narrow)
        grid = _grid(boxes, narrow)
        if grid is not None and grid * per_unit >= 1:
            # All edges fall between characters.
            per_unit = int(grid * per_unit + 1e-9) / grid
        longest = max((len(box.label) for box in boxes), default=0)
        width = narrow * per_unit + 1e-9
        columns = min(room, int(length * per_unit + 0.5))
        return cls(columns, per_unit, width < 1, width >= longest + 1, coloured)

    def draw(self, lane: Lane) -> Iterator[Piece]:
        cells = self._dense_cells(lane) if self.dense else self._cells(lane)
        yield from _merged(cells)

    def _cells(self, lane: Lane) -> list[Piece]:
        cells = [Piece(" ")] * self.columns
        for box in (*lane.waits, *lane.boxes):
            start, end = round(box.start * self.per_unit), round(box.end * self.per_unit)
            end = min(end, self.columns)
            text = self._text(box, end - start)
            cells[start:end] = [
                Piece(each, None if box.look is Look.WAITING else box, dim=box.look is Look.WAITING)
                for each in text
            ]
        return cells

    def _text(self, box: Box, room: int) -> str:
        """The characters of a box."""
        if room <= 0:
            return ""
        if box.look is Look.WAITING:
            return _WAIT * room
        letter = box.look.letter.lower() if box.level else box.look.letter
        label = letter + box.label if self.numbered else letter
        if not self.numbered and self.coloured and room >= len(box.label) > 0:
            label = box.label  # the colour tells the rest
        filler = " " if self.coloured else _FILLS[box.look]
        return label[:room].ljust(room, filler)

    def _dense_cells(self, lane: Lane) -> list[Piece]:
        shares: list[dict[tuple[Look, int], float]] = [{} for _ in range(self.columns)]
        for box in (*lane.waits, *lane.boxes):
            start, end = box.start * self.per_unit, box.end * self.per_unit
            for column in range(int(start), min(int(end) + 1, self.columns)):
                share = min(end, column + 1) - max(start, column)
                if share > 0:
                    key = (box.look, box.level)
                    shares[column][key] = shares[column].get(key, 0.0) + share
        cells = []
        # What has come short in the characters before has the better claim to the next: over a stretch of them
        # each kind of work shows in its proportion, where the most frequent alone would hide the others.
        claims: dict[tuple[Look, int], float] = {}
        for each in shares:
            for key, share in each.items():
                claims[key] = claims.get(key, 0.0) + share
            shown = max(each, key=lambda key: claims[key], default=None)
            if shown is None:
                cells.append(Piece(" "))
                continue
            claims[shown] -= 1.0
            cells.append(self._dense_cell(*shown))
        return cells

    def _dense_cell(self, look: Look, level: int) -> Piece:
        if look is Look.WAITING:
            return Piece(_WAIT, dim=True)
        letter = look.letter.lower() if level else look.letter
        return Piece(letter, Box(look, 0.0, 0.0, "", level))


def _grid(boxes: Iterable[Box], narrow: float) -> float | None:
    """The unit of which all times are multiples, if there is one not much smaller than the narrow boxes."""
    edges = {round(edge / narrow, 6) for box in boxes for edge in (box.start, box.end)}
    for parts in (1, 2, 3, 4):
        if all(abs(edge * parts - round(edge * parts)) < 1e-4 for edge in edges):
            return narrow / parts
    return None


def _merged(cells: Iterable[Piece]) -> Iterator[Piece]:
    """Neighbouring characters of one box as one piece."""
    current: Piece | None = None
    for cell in cells:
        if current is not None and cell.box is current.box and cell.dim == current.dim:
            current = Piece(current.text + cell.text, cell.box, cell.dim)
        else:
            if current is not None:
                yield current
            current = cell
    if current is not None:
        yield current


def _style(piece: Piece, levels: int) -> str:
    """The style in rich's words."""
    if piece.box is None:
        return "bold" if piece.bold else "dim" if piece.dim else ""
    colour = fill(LIGHT, piece.box.look, piece.box.level, levels)
    if piece.box.label.isdecimal() and int(piece.box.label) % 2:
        colour = mix(colour, "#000000", 0.14)  # neighbours of one kind stay apart
    return f"{readable_on(colour)} on {colour}"
