"""Curves as SVG, several runs over each other, with all that the page's script needs to tell values.

The drawing is stretched to whatever width there is; the texts beside it are HTML and keep their size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from trainer.report.axis import Axis, step_axis, tick_texts, value_axis
from trainer.report.html import Html, element, joined
from trainer.report.series import Series, smoothed, thinned
from trainer.report.words import counted, figure

_MOST_POINTS = 800  # of a line
_FEW_POINTS = 60  # up to which points of a dotted line are shown
_NOISY = 120  # points from which on a line is drawn over by its running median
_SIDE = 1000.0  # of the drawing, in its own unit
COLOURS = 8  # of runs, before they repeat


class Look(Enum):
    """How a line is drawn; the value is its class."""

    PLAIN = "plain"
    PALE = "pale"
    MEDIAN = "median"
    DOTTED = "dotted"
    POINTS = "points"


@dataclass(frozen=True)
class Line:
    """One line. `run` is the position of its run, `name` what it is in the run, empty if nothing else is drawn."""

    run: int
    run_name: str
    name: str
    series: Series
    look: Look = Look.PLAIN


@dataclass(frozen=True)
class Chart:
    """A drawing of several lines over steps. `noisy` ones are smoothed if they have many points."""

    key: str
    title: str
    unit: str
    lines: tuple[Line, ...]
    from_zero: bool = False
    noisy: bool = True

    @property
    def window(self) -> int | None:
        """Over how many logged steps lines are smoothed; None where they need not be."""
        longest = max((len(line.series.steps) for line in self.lines if line.look is Look.PLAIN), default=0)
        return longest // 25 | 1 if self.noisy and longest >= _NOISY else None


def draw(chart: Chart, steps: Axis) -> Html:
    """The drawing with its title and axes."""
    values = value_axis(_values(chart), from_zero=chart.from_zero)
    notes = _notes(chart, values)
    unit = element("span", chart.unit, class_="mut") if chart.unit else Html()
    return element(
        "figure",
        element("figcaption", element("strong", chart.title), " ", unit, _latest(chart)),
        element(
            "div",
            _labels("ylabels", "top", values, 5, flip=True),
            element(
                "div",
                _drawing(chart, steps, values),
                element("div", class_="cursor"),
                element("div", class_="dots"),
                element("div", class_="tip"),
                class_="plot",
            ),
            _labels("xlabels", "left", steps, 6),
            class_="frame",
        ),
        element("p", "; ".join(notes), class_="note") if notes else Html(),
        class_="chart",
        data_key=chart.key,
        tabindex=0,
    )


def chart_data(chart: Chart, steps: Axis) -> dict[str, Any]:
    """What the script needs: the ranges of the axes, and the values of the lines."""
    values = value_axis(_values(chart), from_zero=chart.from_zero)
    lines = [(line, thinned(line.series, _MOST_POINTS)) for line in chart.lines]
    return {
        "x": [steps.low, steps.high],
        "y": [values.low, values.high],
        "lines": [
            {
                "run": line.run,
                "colour": line.run % COLOURS,
                "name": ", ".join(part for part in (line.run_name, line.name) if part),
                "steps": series.steps,
                "values": [None if value is None else float(f"{value:.6g}") for value in series.values],
            }
            for line, series in lines
        ],
    }


def common_steps(charts: Sequence[Chart]) -> Axis:
    """One axis for all charts, so that what is below each other belongs together."""
    return step_axis([step for chart in charts for line in chart.lines for step in line.series.steps])


def _values(chart: Chart) -> list[float]:
    return [value for line in chart.lines for _, value in line.series.known]


def _latest(chart: Chart) -> Html:
    """The last value of a chart of one run."""
    last = chart.lines[0].series.last if len({line.run for line in chart.lines}) == 1 else None
    return Html() if last is None else element("span", figure(last[1]), class_="latest")


def _notes(chart: Chart, values: Axis) -> list[str]:
    notes = []
    if chart.window is not None:
        notes.append(f"bold: median of {chart.window} logged steps")
    for number, where in (
        (sum(value > values.high for value in _values(chart)), "above"),
        (sum(value < values.low for value in _values(chart)), "below"),
    ):
        if number:
            notes.append(f"{counted(number, 'value lies', 'values lie')} {where} what is shown")
    if not _values(chart):
        notes.append("nothing was logged")
    return notes


def _labels(name: str, side: str, axis: Axis, most: int, *, flip: bool = False) -> Html:
    ticks = axis.ticks(most)
    places = [1 - axis.place(tick) if flip else axis.place(tick) for tick in ticks]
    spans = (
        element("span", label, style=f"{side}:{100 * place:.2f}%")
        for label, place in zip(tick_texts(ticks), places, strict=True)
    )
    return element("div", *spans, class_=name, aria_hidden="true")


def _drawing(chart: Chart, steps: Axis, values: Axis) -> Html:
    grid = "".join(f"M0,{_SIDE * (1 - values.place(tick)):.1f}h{_SIDE:g}" for tick in values.ticks(5))
    return element(
        "svg",
        element("path", d=grid, class_="grid"),
        *(path for line in chart.lines for path in _paths(line, chart.window, steps, values)),
        viewBox=f"0 0 {_SIDE:g} {_SIDE:g}",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"{chart.title}: {_told(chart)}",
    )


def _told(chart: Chart) -> str:
    """The chart in words, for who cannot see it."""
    told = []
    for line in chart.lines:
        known = line.series.known
        if known:
            (first, begin), (last, end) = known[0], known[-1]
            name = " ".join(part for part in (line.run_name, line.name) if part)
            told.append(f"{name} {figure(begin)} at step {first}, {figure(end)} at step {last}".strip())
    return "; ".join(told) or "no values"


def _paths(line: Line, window: int | None, steps: Axis, values: Axis) -> Iterator[Html]:
    if line.look is not Look.PLAIN or window is None:
        yield _path(line, line.series, line.look, steps, values)
        if line.look is Look.DOTTED and len(line.series.steps) <= _FEW_POINTS:
            yield _path(line, line.series, Look.POINTS, steps, values)
        return
    yield _path(line, line.series, Look.PALE, steps, values)
    yield _path(line, smoothed(line.series, window), Look.MEDIAN, steps, values)


def _path(line: Line, series: Series, look: Look, steps: Axis, values: Axis) -> Html:
    commands, joins = [], False
    points = list(_points(thinned(series, _MOST_POINTS), steps, values))
    for point, following in zip(points, [*points, None][1:], strict=True):
        if point is not None:
            commands.append(f"{'L' if joins else 'M'}{point[0]:.1f},{point[1]:.1f}")
            if not joins and (look is Look.POINTS or following is None):
                commands.append("h0")  # a line of no length has round ends: a dot
        joins = point is not None and look is not Look.POINTS
    classes = f"line {look.value} c{line.run % COLOURS}" + (" again" if line.run >= COLOURS else "")
    return element("path", d="".join(commands), class_=classes, data_run=line.run)


def _points(series: Series, steps: Axis, values: Axis) -> Iterator[tuple[float, float] | None]:
    for step, value in zip(series.steps, series.values, strict=True):
        if value is None:
            yield None
        else:
            yield _SIDE * steps.place(step), _SIDE * (1 - values.place(value))


def legend(run_names: Sequence[str], *, validation: bool) -> Html:
    """Which colour is which run, as buttons that hide and show it, and which line is the validation loss."""
    parts: list[str] = []
    if len(run_names) > 1:
        parts += [
            element("button", chip(index), name, type="button", data_run=index, aria_pressed="true")
            for index, name in enumerate(run_names)
        ]
    if validation:
        parts.append(_key_line("plain", "training"))
        parts.append(_key_line("dotted", "validation"))
    return element("div", joined(parts), class_="legend") if parts else Html()


def chip(run: int) -> Html:
    """The colour of a run."""
    return element("span", class_=f"chip c{run % COLOURS}" + (" again" if run >= COLOURS else ""))


def _key_line(look: str, name: str) -> Html:
    sample = element(
        "svg", element("path", d="M1,5H27", class_=f"line {look}"), viewBox="0 0 28 10", width=28, height=10
    )
    return element("span", sample, name, class_="key")
