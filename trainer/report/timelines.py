"""The pictures of the steps that a run measured, drawn for the page from `timeline/step-N.json`.

Where that file cannot be read, its `step-N.svg` is shown as an image, in which no script could run.
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass

from parallelisms.pipeline.measured import Timeline
from parallelisms.pipeline.picture_build import picture_of_timeline
from parallelisms.pipeline.picture_layout import lay_out
from parallelisms.pipeline.picture_svg import draw_svg
from parallelisms.pipeline.timeline_file import TimelineFileError, read_timeline
from trainer.report.files import FolderReader
from trainer.report.html import Html, element, printable

_FOLDER = "timeline"
_MOST_STEPS = 6
_MOST_ACTIONS = 300_000  # of one step: beyond, no browser would be quick to show it
_PAGE = 1190  # pixels inside the widest page: what can be seen there at once should be
_NAME = re.compile(r"step-(\d{1,15})\.(?:json|svg)")


@dataclass(frozen=True)
class DrawnTimeline:
    """The picture of one step."""

    step: int
    drawing: Html


@dataclass(frozen=True)
class DrawnTimelines:
    """Pictures of steps, the latest first, and of how many earlier steps there is none."""

    drawn: tuple[DrawnTimeline, ...]
    left_out: int


def draw_timelines(reader: FolderReader) -> DrawnTimelines:
    """The pictures of the latest steps that a run measured; what cannot be drawn is told to the reader."""
    steps = sorted(_steps(reader), reverse=True)
    drawn = []
    for step in steps[:_MOST_STEPS]:
        drawing = _draw(reader, step)
        if drawing is not None:
            drawn.append(DrawnTimeline(step, drawing))
    return DrawnTimelines(tuple(drawn), max(0, len(steps) - _MOST_STEPS))


def _steps(reader: FolderReader) -> set[int]:
    folder = reader.folder / _FOLDER
    try:
        names = [path.name for path in folder.iterdir() if path.is_file()]
    except FileNotFoundError:
        return set()
    except OSError as error:
        reader.problems.append(f"{_FOLDER} cannot be read: {error.strerror}")
        return set()
    return {int(match[1]) for match in map(_NAME.fullmatch, names) if match}


def _draw(reader: FolderReader, step: int) -> Html | None:
    """The picture of a step from its data, else from its picture, else none."""
    name = f"{_FOLDER}/step-{step}"
    try:
        timeline = read_timeline(reader.folder / f"{name}.json")
        _check(timeline)
        picture = picture_of_timeline(timeline, timeline.replicas[0])
        drawing = Html(printable(draw_svg(picture)))  # in which all text is escaped
    except Exception as error:  # a damaged file may break the drawing in any way: the page says in which
        reason = str(error) if isinstance(error, TimelineFileError) else f"{type(error).__name__}: {error}"
        image = _image(reader, f"{name}.svg", step)
        instead = "" if image is None else f"; {name}.svg is shown as it is"
        reader.problems.append(f"{name}.json cannot be drawn: {reason}{instead}")
        return image
    layout = lay_out(picture)
    # As wide as the page, but neither so narrow that its texts cannot be read nor larger than it was drawn.
    narrowest = min(layout.width / layout.zoom, _PAGE)
    width = f"min-width:{narrowest:.0f}px;max-width:{layout.width:.0f}px"
    return element("div", element("div", drawing, style=width), class_="scroll picture")


def _check(timeline: Timeline) -> None:
    """Raise TimelineFileError for sizes that would take very long to draw: they come from a damaged file."""
    schedule = timeline.schedule
    actions = schedule.runs * sum(map(len, schedule.actions))
    measured = sum(len(rank.actions) for rank in timeline.ranks)
    if max(actions, measured) > _MOST_ACTIONS:
        raise TimelineFileError(f"it has more than {_MOST_ACTIONS:,} actions")
    if not timeline.ranks or schedule.placement.ranks != len(schedule.actions):
        raise TimelineFileError("its ranks are not those of its schedule")


def _image(reader: FolderReader, name: str, step: int) -> Html | None:
    if not (reader.folder / name).exists():
        return None
    drawing = reader.text(name)
    if drawing is None:
        return None
    if not (drawing.lstrip().startswith("<svg") and drawing.rstrip().endswith("</svg>")):
        reader.problems.append(f"{name} is no whole picture")
        return None
    source = "data:image/svg+xml;base64," + base64.b64encode(drawing.encode()).decode()
    image = element("img", src=source, alt=f"measured timeline of step {step}")
    return element("div", image, class_="scroll picture")
