"""Several runs in order of how well they did, with the settings in which they differ: which setting gave which loss."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trainer.report.html import Html, element
from trainer.report.run import Run
from trainer.report.widgets import opens, table
from trainer.report.words import UNKNOWN, figure, literal

_MOST_KEYS = 8
_OF_NO_MATTER = ("job.dump_folder", "job.description")


def ranking(runs: Sequence[Run]) -> Html:
    """The best first: by the lowest validation loss where all have one, else by the last loss. Nothing for one run."""
    if len(runs) < 2:
        return Html()
    validated = all(run.curves.validation_loss.known for run in runs)
    ordered = sorted(runs, key=lambda run: _score(run, validated))
    keys = _different(runs)[:_MOST_KEYS]
    head = ["Run", *(element("code", key) for key in keys), "Last loss", "Lowest validation loss"]
    rows = [[run.name, *(_setting(run, key) for key in keys), _last(run), _lowest(run)] for run in ordered]
    title = "Best first, by " + ("validation loss" if validated else "last loss")
    return opens(title, table(head, rows, numbers=(len(head) - 2, len(head) - 1)), open_=True)


def _score(run: Run, validated: bool) -> float:
    point = run.curves.validation_loss.lowest if validated else run.curves.loss.last
    return math.inf if point is None else point[1]


def _different(runs: Sequence[Run]) -> list[str]:
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in _OF_NO_MATTER)
    return [key for key in keys if len({_setting(run, key) for run in runs}) > 1]


def _setting(run: Run, key: str) -> str:
    return literal(run.config[key].value) if key in run.config else UNKNOWN


def _last(run: Run) -> str:
    return UNKNOWN if run.curves.loss.last is None else figure(run.curves.loss.last[1])


def _lowest(run: Run) -> str:
    lowest = run.curves.validation_loss.lowest
    return UNKNOWN if lowest is None else figure(lowest[1])
