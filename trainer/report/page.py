"""The whole page: head, sections, and the script that shows values under the pointer.

Its content security policy lets a browser load nothing and run no script but ours, whatever else might be in it.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime

from trainer import __version__
from trainer.report.configuration import configuration
from trainer.report.curves import charts, curves, curves_data
from trainer.report.environment import environment
from trainer.report.html import Html, element
from trainer.report.plan import plan
from trainer.report.run import Run
from trainer.report.script import SCRIPT
from trainer.report.style import STYLE
from trainer.report.summary import failures, summary
from trainer.report.widgets import heading, note, opens, section
from trainer.report.words import counted

_SECTIONS = ("Summary", "Curves", "Timeline", "Plan", "Configuration", "Environment")


def page(runs: Sequence[Run], defaults: Mapping[str, object], made: datetime) -> str:
    """The report of one run or more as an HTML document.

    Args:
        runs: at least one.
        defaults: of every key of the configuration that has one, by "table.key".
        made: when, as the foot of the page says.
    """
    drawn = charts(runs)
    body = [
        _header(runs),
        _navigation(),
        element(
            "main",
            failures(runs),
            summary(runs),
            curves(runs, drawn),
            _timelines(runs),
            plan(runs),
            configuration(runs, defaults),
            environment(runs),
        ),
        element("footer", f"Stageline {__version__}, {made:%Y-%m-%d %H:%M}"),
        element("script", _json(curves_data(drawn)), type="application/json", id="data"),
        element("script", Html(SCRIPT)),
    ]
    document = element("html", _head(runs), element("body", *body), lang="en")
    return f"<!doctype html>\n{document}\n"


def _head(runs: Sequence[Run]) -> Html:
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    policy_name = {"http-equiv": "Content-Security-Policy"}
    return element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", content=policy, **policy_name),
        element("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"{_title(runs)} – Stageline"),
        element("style", Html(STYLE)),
    )


def _title(runs: Sequence[Run]) -> str:
    return runs[0].name if len(runs) == 1 else counted(len(runs), "run", "runs") + " compared"


def _header(runs: Sequence[Run]) -> Html:
    if len(runs) == 1:
        below = runs[0].description or str(runs[0].path)
    else:
        below = ", ".join(run.name for run in runs)
    return element("header", element("h1", _title(runs)), element("p", below, class_="mut"))


def _navigation() -> Html:
    links = (element("a", name, href=f"#{name.lower()}") for name in _SECTIONS)
    return element("nav", *links, aria_label="Sections")


def _timelines(runs: Sequence[Run]) -> Html:
    if not any(run.timelines.drawn for run in runs):
        return section(
            "timeline",
            "Timeline",
            note("No step was measured; [profiling] pipeline_timeline_steps says which steps are."),
        )
    several = len(runs) > 1
    parts = [part for index, run in enumerate(runs) for part in _timelines_of(index, run, several)]
    return section("timeline", "Timeline", *parts)


def _timelines_of(index: int, run: Run, several: bool) -> Iterator[Html]:
    yield heading(index, run.name, several)
    if not run.timelines.drawn:
        yield note("No step was measured.")
        return
    for position, each in enumerate(run.timelines.drawn):
        yield opens(f"Step {each.step:,}", each.drawing, open_=position == 0)
    if run.timelines.left_out:
        steps = counted(run.timelines.left_out, "earlier step", "earlier steps")
        yield note(f"{steps} left out; stageline timeline {run.path} --step N draws any of them.")


def _json(data: object) -> Html:
    """JSON in which no tag can begin or end."""
    dumped = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return Html(dumped.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))
