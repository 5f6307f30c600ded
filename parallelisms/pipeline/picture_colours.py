"""Colours and patterns of the picture: told apart by colour-blind readers, in print, on light and on dark.

The hues are those of Okabe and Ito (Color Universal Design, 2008), which stay apart under the usual kinds of
colour blindness. In grey they come close to each other, so each has a pattern as well: forward none, backward
crossed lines, its two halves the one and the other of these lines each (input gradient rising, weight gradient
falling), communication upright lines, waiting an outline with sparse lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from parallelisms.pipeline.picture import Look

Theme = Literal["auto", "light", "dark"]


@dataclass(frozen=True)
class Palette:
    """Colours of one theme, as #rrggbb."""

    background: str
    ink: str
    muted: str
    grid: str
    lane: str
    wait_line: str
    fills: dict[Look, str]
    towards: str  # where the later stages of a rank fade to


LIGHT = Palette(
    background="#ffffff",
    ink="#1f2328",
    muted="#636c76",
    grid="#e4e7eb",
    lane="#f5f6f8",
    wait_line="#c3c9d0",
    fills={
        Look.FORWARD: "#1f78b8",
        Look.BACKWARD: "#d55e00",
        Look.INPUT_GRADIENT: "#e69f00",
        Look.WEIGHT_GRADIENT: "#009e73",
        Look.COMMUNICATION: "#b8649a",
    },
    towards="#ffffff",
)
DARK = Palette(
    background="#0d1117",
    ink="#e6edf3",
    muted="#9198a1",
    grid="#262c36",
    lane="#151b23",
    wait_line="#3d444d",
    fills={
        Look.FORWARD: "#4ba3e3",
        Look.BACKWARD: "#e8703a",
        Look.INPUT_GRADIENT: "#e8ab30",
        Look.WEIGHT_GRADIENT: "#2db68c",
        Look.COMMUNICATION: "#cf86b2",
    },
    towards="#0d1117",
)

# The short names of looks in classes and identities.
CODES = {
    Look.FORWARD: "f",
    Look.BACKWARD: "b",
    Look.INPUT_GRADIENT: "i",
    Look.WEIGHT_GRADIENT: "w",
    Look.COMMUNICATION: "c",
    Look.WAITING: "z",
}
_TILE = 8.0  # of the patterns, in pixels
_RISING = "M-2,2 L2,-2 M0,8 L8,0 M6,10 L10,6"
_FALLING = "M-2,6 L2,10 M0,0 L8,8 M6,-2 L10,2"
_PATTERNS = {
    Look.FORWARD: "",
    Look.BACKWARD: f"{_RISING} {_FALLING}",
    Look.INPUT_GRADIENT: _RISING,
    Look.WEIGHT_GRADIENT: _FALLING,
    Look.COMMUNICATION: "M2,0 V8 M6,0 V8",
    Look.WAITING: _RISING,
}


def fill(palette: Palette, look: Look, level: int, levels: int) -> str:
    """The colour of a box: of a rank's later stages it is paler."""
    paler = 0.0 if levels < 2 else 0.55 * level / (levels - 1)
    return mix(palette.fills[look], palette.towards, paler)


def mix(colour: str, other: str, share: float) -> str:
    """`share` of the other colour."""
    parts = zip(_channels(colour), _channels(other), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in parts)


def readable_on(colour: str) -> str:
    """Black or white, whichever has the greater contrast (WCAG 2) on the colour."""
    luminance = _luminance(colour)
    return "#ffffff" if 1.05 / (luminance + 0.05) >= (luminance + 0.05) / 0.05 * 0.6 else "#10151b"


def style(identity: str, theme: Theme, levels: int) -> str:
    """The style sheet of one picture, whose rules reach no other picture on the page.

    The light colours stand first and plain, for programs that know no media queries.
    """
    common = (
        f"#{identity} text{{font-family:ui-sans-serif,system-ui,-apple-system,'Segoe UI',Roboto,"
        f"'Helvetica Neue',Arial,'DejaVu Sans',sans-serif;font-variant-numeric:tabular-nums}}"
    )
    if theme == "dark":
        return common + "".join(_rules(identity, DARK, levels))
    light = common + "".join(_rules(identity, LIGHT, levels))
    if theme == "light":
        return light
    dark = "".join(_rules(identity, DARK, levels))
    return f"{light}@media (prefers-color-scheme:dark){{{dark}}}"


def _rules(identity: str, palette: Palette, levels: int) -> Iterator[str]:
    def rule(name: str, declaration: str) -> str:
        return f"#{identity} .{name}{{{declaration}}}"

    yield rule("bg", f"fill:{palette.background}")
    yield rule("ink", f"fill:{palette.ink}")
    yield rule("mut", f"fill:{palette.muted}")
    yield rule("grid", f"stroke:{palette.grid}")
    yield rule("lane", f"fill:{palette.lane}")
    yield rule("mark", f"stroke:{palette.muted}")
    yield rule("zp", f"stroke:{palette.wait_line}")
    yield rule("zf", f"fill:{palette.lane}")
    for look in palette.fills:
        for level in range(levels):
            name, colour = f"{CODES[look]}{level}", fill(palette, look, level, levels)
            text = readable_on(colour)
            yield rule(f"{name}f", f"fill:{colour}")
            yield rule(f"{name}p", f"stroke:{mix(colour, text, 0.26)}")
            # The edge keeps the digits apart from the lines of the pattern.
            yield rule(f"{name}t", f"fill:{text};stroke:{colour}")


def patterns(identity: str, levels: int, zoom: float) -> Iterator[str]:
    """The definitions that boxes are filled with, one for each look and level."""
    for look in Look:
        for level in range(1 if look is Look.WAITING else levels):
            yield _pattern(identity, look, pattern_of(look, level), zoom)


def pattern_of(look: Look, level: int) -> str:
    """The name of a look's pattern, without the identity of the picture."""
    return "z" if look is Look.WAITING else f"{CODES[look]}{level}"


def _pattern(identity: str, look: Look, name: str, zoom: float) -> str:
    lines = _PATTERNS[look]
    drawn = f'<path class="{name}p" d="{lines}" fill="none"/>' if lines else ""
    # Not as much larger as the rest: narrow boxes must show enough of it.
    larger = "" if zoom == 1 else f' patternTransform="scale({zoom**0.5:.3g})"'
    return (
        f'<pattern id="{identity}-{name}" width="{_TILE:g}" height="{_TILE:g}" '
        f'patternUnits="userSpaceOnUse"{larger}>'
        f'<rect class="{name}f" width="{_TILE:g}" height="{_TILE:g}"/>{drawn}</pattern>'
    )


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _luminance(colour: str) -> float:
    linear = [
        c / 12.92 if (c := channel / 255) <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for channel in _channels(colour)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
