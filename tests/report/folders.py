"""Run folders that tests write, and pages that they take apart."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from parallelisms.pipeline.timeline_file import timeline_text
from tests.pipeline.synthetic import measured, schedule_of
from trainer.config.load import config_to_toml, load
from trainer.plan.plan import make_plan
from trainer.report.page import page
from trainer.report.run import read_runs

DEFAULTS = {"training.steps": 10_000, "optimizer.lr": 8e-4}
_VOID = {"meta", "img", "br"}


@cache
def plan_text(ranks: int = 4) -> str:
    """plan.json of the debug configuration as a pipeline on so many ranks."""
    config = load(["--experimental.pipeline_parallel_degree", str(ranks)]).config
    return json.dumps(make_plan(config, ranks).sections())


@cache
def timeline_of_step(step: int) -> str:
    """timeline/step-N.json of a pipeline of 4 ranks."""
    text = timeline_text(measured(schedule_of("1F1B", 4, 8, unit=0.01)))
    return text.replace('"step": 3', f'"step": {step}')


def row(step: int, **changes: Any) -> dict[str, Any]:
    """A row of metrics.jsonl."""
    usual = {
        "step": step,
        "loss": 2 + 5 * math.exp(-step / 20),
        "grad_norm": 1 + 1 / step,
        "lr": 1e-3 / step,
        "tokens": 2048 * step,
        "tokens_per_second": 2000.0 + step,
        "step_seconds": 0.5,
        "data_seconds": 0.001,
        "mfu": None,
        "memory_bytes": 2**29,
        "skipped": False,
    }
    return usual | changes


def write_run(
    folder: Path,
    *,
    options: Iterable[str] = (),
    rows: Iterable[Mapping[str, Any]] | None = None,
    timelines: Iterable[int] = (),
) -> Path:
    """A whole run folder, by default with 30 logged steps and two validations, and no timeline."""
    folder.mkdir(parents=True)
    if rows is None:
        rows = [
            *(row(step) for step in range(1, 31)),
            {"step": 15, "validation_loss": 4.5},
            {"step": 30, "validation_loss": 3.5},
        ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    (folder / "config.toml").write_text(config_to_toml(load(list(options)).config))
    (folder / "plan.json").write_text(plan_text())
    (folder / "environment.json").write_text(json.dumps({"python": "3.11.7", "torch": "2.13.0", "hosts": 2}))
    for step in timelines:
        (folder / "timeline").mkdir(exist_ok=True)
        (folder / "timeline" / f"step-{step}.json").write_text(timeline_of_step(step))
    return folder


def make_page(*folders: Path) -> str:
    """The report of these run folders."""
    return page(read_runs(folders), DEFAULTS, datetime(2026, 1, 2, 3, 4))


@dataclass
class Element:
    """One element of a page."""

    name: str
    attributes: dict[str, str | None]
    text: str = ""


@dataclass
class TakenApart(HTMLParser):
    """The elements of a page in order, each with all the text inside; raises if they are not well nested."""

    source: str
    elements: list[Element] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._open: list[Element] = []
        self.feed(self.source)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs))
        self.elements.append(element)
        if tag not in _VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(Element(tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open
        assert self._open.pop().name == tag

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text += data

    def all(self, name: str, class_: str | None = None) -> list[Element]:
        """The elements of a name, and of a class."""
        return [
            each
            for each in self.elements
            if each.name == name
            and (class_ is None or class_ in (each.attributes.get("class") or "").split())
        ]

    def section(self, identity: str) -> str:
        """The text of a section."""
        return next(each.text for each in self.all("section") if each.attributes.get("id") == identity)


def assert_harmless(source: str) -> TakenApart:
    """Nothing on the page runs but the program's own script, and nothing is loaded."""
    taken = TakenApart(source)
    kinds = [script.attributes for script in taken.all("script")]
    assert kinds == [{"type": "application/json", "id": "data"}, {}]
    assert not {each.name for each in taken.elements} & {
        "link",
        "iframe",
        "object",
        "embed",
        "base",
        "form",
        "image",
        "use",
        "foreignobject",
        "animate",
        "set",
    }
    for each in taken.elements:
        for name, value in each.attributes.items():
            assert not name.startswith("on"), each
            if name in ("src", "href", "xlink:href"):
                assert (value or "").startswith(("#", "data:image/svg+xml;base64,")), each
            if name in ("style", "fill"):
                assert "url(" not in (value or "").replace("url(#timeline-", ""), each
    return taken
