"""The configuration: in what the runs differ, or in what one differs from the defaults; and every key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainer.report.html import Html, element
from trainer.report.run import Run
from trainer.report.widgets import Fact, comparison, note, opens, section, table
from trainer.report.words import literal

_UNSET = "not set"


def configuration(runs: Sequence[Run], defaults: Mapping[str, object]) -> Html:
    """The section about the configuration. `defaults`: of every key that has one, by "table.key"."""
    readable = [run for run in runs if run.config]
    if not readable:
        return section("configuration", "Configuration", note("No configuration could be read."))
    if len(runs) == 1:
        return section("configuration", "Configuration", *_of_one(runs[0], defaults))
    return section("configuration", "Configuration", *_of_several(runs))


def _of_one(run: Run, defaults: Mapping[str, object]) -> list[Html]:
    values = _values(run)
    usual = {key: literal(value) for key, value in defaults.items()}
    changed = [
        [_key(key), value, usual.get(key, _UNSET)]
        for key, value in values.items()
        if value != usual.get(key, _UNSET)
    ]
    every = table(["Key", "Value"], [[_key(key), value] for key, value in values.items()])
    parts = [opens(f"All {len(values)} keys", every)]
    if defaults:
        parts.insert(0, table(["Set differently from the defaults", "Value", "Default"], changed))
    return parts


def _of_several(runs: Sequence[Run]) -> list[Html]:
    names = [run.name for run in runs]
    columns = [_values(run) for run in runs]
    keys = _in_order(list(dict.fromkeys(key for column in columns for key in column)))
    different = [key for key in keys if len({column.get(key) for column in columns}) > 1]

    def side_by_side(chosen: Sequence[str], corner: str) -> Html:
        facts = [[Fact(key, column.get(key, _UNSET)) for key in chosen] for column in columns]
        return comparison(names, facts, corner)

    parts = (
        [side_by_side(different, "What differs")] if different else [note("The configurations are the same.")]
    )
    return [*parts, opens(f"All {len(keys)} keys", side_by_side(keys, ""))]


def _in_order(keys: Sequence[str]) -> list[str]:
    """The keys of one table together, also those that only some runs have."""
    tables = list(dict.fromkeys(key.partition(".")[0] for key in keys))
    return sorted(keys, key=lambda key: tables.index(key.partition(".")[0]))


def _values(run: Run) -> dict[str, str]:
    return {key: literal(value.value) for key, value in run.config.items()}


def _key(name: str) -> Html:
    return element("code", name)
