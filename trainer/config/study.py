"""A study: a file with a table [sweep], which stands for several runs.

    [sweep.grid]                     # every combination
    optimizer.lr = [1e-3, 3e-4]
    model.override.dim = [128, 256]

    [[sweep.list]]                   # what goes together; a name is optional
    name = "wide"
    model.override = {dim = 512, n_layers = 4}

    [sweep.random]                   # so many draws
    runs = 8
    seed = 0
    optimizer.lr = {low = 1e-4, high = 1e-2, log = true}
    optimizer.weight_decay = [0.0, 0.1]

Where a file has more than one kind, each entry of one is combined with each of the others.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.config.describe import find_field, literal
from trainer.config.layers import SWEEP
from trainer.config.load import Loaded, load, read_study_table
from trainer.config.report import Given, Problem, Source, nearest, raise_for
from trainer.errors import ConfigurationError

_KINDS = ("grid", "list", "random")
_DISTRIBUTION = ("low", "high", "log")
_DIGITS = 4  # of a number that is drawn, so that a run's name says it whole
_LONGEST_NAME = 120
_NAME = "name"

Setting = dict[str, Given]
"""Values of one run by "table.key". Under `_NAME`: how a listed entry is called, and its keys."""


@dataclass(frozen=True)
class StudyRun:
    """One run of a study. `values`: by key, in which it differs from the others."""

    name: str
    values: Mapping[str, object]
    loaded: Loaded

    @property
    def folder(self) -> Path:
        return self.loaded.dump_folder


@dataclass(frozen=True)
class Study:
    """All runs of a file, in order. `folder` holds their folders."""

    name: str
    folder: Path
    runs: tuple[StudyRun, ...]


def is_study(argv: Sequence[str]) -> bool:
    """Whether the arguments of a training name the file of a study."""
    return bool(read_study_table(argv))


def read_study(argv: Sequence[str]) -> Study:
    """The runs of the study that the arguments name, each with its whole configuration, of which the rules hold.

    `--table.key value` holds for all runs.

    Raises ConfigurationError with everything that is wrong: in the table [sweep], or in any run.
    """
    table = read_study_table(argv)
    if not table:
        load(argv)  # says what is wrong with the file, if anything is
        raise ConfigurationError(f"{' '.join(argv)}: is no study: it has no table [{SWEEP}]")
    settings = _settings(table)
    names = _names(settings)
    try:
        base = load(argv, settings[0])
    except ConfigurationError as error:  # of the file as a whole, most likely, so once is enough
        raise ConfigurationError(f"{names[0]}: {error}") from error
    fixed = [key for key in settings[0] if key in base.given and base.given[key].source.on_command_line]
    raise_for((Problem((key,), "is varied by the study") for key in fixed), base.given)
    runs, reports = [], []
    for name, setting in zip(names, settings, strict=True):
        folder = Given(str(base.dump_folder / name), Source(base.shown_path, "job.dump_folder"))
        try:
            loaded = load(_without_folder(argv), {**setting, "job.dump_folder": folder})
        except ConfigurationError as error:
            reports.append(f"{name}: {error}")
            continue
        runs.append(StudyRun(name, {key: given.value for key, given in setting.items()}, loaded))
    if reports:
        raise ConfigurationError("\n".join(reports))
    return Study(base.name, base.dump_folder, tuple(runs))


def _without_folder(argv: Sequence[str]) -> list[str]:
    """The folder of the study is that of no run."""
    rest, words = [], iter(argv)
    for word in words:
        if word == "--job.dump_folder":
            next(words, None)
        elif not word.startswith("--job.dump_folder="):
            rest.append(word)
    return rest


# The table


def _settings(table: Mapping[str, Given]) -> list[Setting]:
    """The values of each run. Raises ConfigurationError."""
    problems: list[Problem] = []
    kinds: dict[str, list[Setting]] = {}
    for key, given in table.items():
        kind = key.split(".")[1] if "." in key else ""
        if kind not in _KINDS:
            near = nearest(kind, _KINDS)
            problems.append(
                Problem(
                    (key,), "is no kind of sweep", "grid, list or random", f"{SWEEP}.{near}" if near else None
                )
            )
        elif kind == "list":
            kinds[kind] = list(_listed(given, problems))
        elif isinstance(given.value, dict):
            entries = _flat(given.value, given.source)
            kinds[kind] = list(
                _grid(entries, problems) if kind == "grid" else _drawn(entries, given, problems)
            )
        else:
            problems.append(Problem((key,), "a table is expected, not a single value"))
    raise_for(problems, table)
    counts = Counter(key for settings in kinds.values() for key in settings[0] if key != _NAME)
    if twice := [key for key, count in counts.items() if count > 1]:
        place = next(iter(table.values())).source.place
        raise ConfigurationError(f"{place}: {twice[0]} is varied by two kinds of sweep")
    runs = [
        {key: given for setting in combination for key, given in setting.items()}
        for combination in itertools.product(*kinds.values())
    ]
    if not runs:
        raise ConfigurationError(f"{next(iter(table.values())).source.place}: [{SWEEP}] makes no run")
    return runs


def _flat(entries: Mapping[str, object], source: Source, prefix: str = "") -> Setting:
    """Entries of nested tables by "table.key", down to where the configuration has a key."""
    flat: Setting = {}
    for name, value in entries.items():
        key = f"{prefix}{name}"
        inside = key.startswith("model.override.") or (
            find_field(key) is not None and key != "model.override"
        )
        if isinstance(value, dict) and not inside:
            flat |= _flat(value, source, f"{key}.")
        else:
            flat[key] = Given(value, Source(source.place, key, line=source.line))
    return flat


def _listed(given: Given, problems: list[Problem]) -> Iterator[Setting]:
    entries = given.value if isinstance(given.value, list) else []
    if not entries or not all(isinstance(each, dict) and each for each in entries):
        place = f"{given.source.place}: {SWEEP}.list"
        problems.append(
            Problem((), "is no list of runs", "[[sweep.list]] for each, with keys below", place=place)
        )
        return
    for entry in entries:
        setting = _flat(entry, given.source)
        name = setting.get(_NAME)
        if name is not None and not (isinstance(name.value, str) and _plain(name.value) == name.value != ""):
            problems.append(_at(name, "name", "is no name of a folder", "letters, digits, and any of .=,+-_"))
        elif name is not None:
            setting[_NAME] = Given((setting.pop(_NAME).value, frozenset(setting)), name.source)
        yield setting


def _grid(entries: Setting, problems: list[Problem]) -> Iterator[Setting]:
    for key, given in entries.items():
        if not isinstance(given.value, list) or not given.value:
            problems.append(_at(given, key, "is no list of the values to try"))
            return
    columns = [[Given(value, given.source) for value in given.value] for given in entries.values()]  # type: ignore[attr-defined]
    for values in itertools.product(*columns):
        yield dict(zip(entries, values, strict=True))


def _drawn(entries: Setting, table: Given, problems: list[Problem]) -> Iterator[Setting]:
    """As many draws as the table says, the same ones each time."""
    counts = {}
    for key, usual in (("runs", None), ("seed", 0)):
        given = entries.pop(key, None)
        value = usual if given is None else given.value
        if not isinstance(value, int) or isinstance(value, bool) or value < (key == "runs"):
            needs = "integer ≥ 1: how many runs" if key == "runs" else "integer ≥ 0"
            problems.append(_at(given or table, f"{SWEEP}.random.{key}", "is no such number", needs))
            return
        counts[key] = value
    for key, given in entries.items():
        if (problem := _distribution_problem(given.value)) is not None:
            problems.append(
                _at(given, key, problem, "a list, or {low = ..., high = ..., log = true or false}")
            )
    if problems:
        return
    for index in range(counts["runs"]):
        setting = {}
        for key, given in entries.items():
            # Of its own for each key and run: more runs or another key change none of those that there are.
            generator = random.Random(f"{counts['seed']} {index} {key}")
            setting[key] = Given(_draw(given.value, generator), given.source)
        yield setting


def _distribution_problem(value: object) -> str | None:
    if isinstance(value, list):
        return None if value else "is an empty list"
    if not isinstance(value, dict):
        return "is neither a list nor a range"
    low, high, log = (value.get(key) for key in _DISTRIBUTION)
    if set(value) - set(_DISTRIBUTION) or not isinstance(log, bool | None):
        return "is no range"
    if not all(isinstance(end, int | float) and not isinstance(end, bool) for end in (low, high)):
        return "has no low and high"
    if not low < high or (log and low <= 0):  # type: ignore[operator]
        return "is an empty range" if not low < high else "has no logarithm at its low end"  # type: ignore[operator]
    return None


def _draw(choices: object, generator: random.Random) -> object:
    if isinstance(choices, list):
        return generator.choice(choices)
    assert isinstance(choices, dict)
    low, high = choices["low"], choices["high"]
    if choices.get("log"):
        drawn = math.exp(generator.uniform(math.log(low), math.log(high)))
    elif isinstance(low, int) and isinstance(high, int):
        return generator.randint(low, high)
    else:
        drawn = generator.uniform(low, high)
    if isinstance(low, int) and isinstance(high, int):
        return min(high, max(low, round(drawn)))
    return float(f"{drawn:.{_DIGITS}g}")


def _at(given: Given, key: str, message: str, allowed: str | None = None) -> Problem:
    shown = Given(given.value, Source(given.source.place, key))
    return Problem((), message, allowed, place=f"{shown.source} = {literal(shown.value)[:60]}")


# Names


def _names(settings: Sequence[Setting]) -> list[str]:
    """Of each run, from what it is set to: "lr=0.001,dim=256". Raises ConfigurationError if two are the same."""
    keys = list(dict.fromkeys(key for setting in settings for key in setting if key != _NAME))
    ends = Counter(key.rpartition(".")[2] for key in keys)
    words = {key: end if ends[end := key.rpartition(".")[2]] == 1 else key for key in keys}
    names = []
    for setting in settings:
        given = setting.pop(_NAME, None)
        name, named = ([], frozenset()) if given is None else ([given.value[0]], given.value[1])  # type: ignore[index]
        parts = [f"{words[key]}={_value(each.value)}" for key, each in setting.items() if key not in named]
        parts = [*name, *parts]
        names.append(_plain(",".join(parts))[:_LONGEST_NAME])
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigurationError(
            f"[{SWEEP}]: two runs are the same, or are called so: {', '.join(twice[:3])}"
        )
    return names


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if isinstance(value, list):
        return "+".join(map(_value, value))
    return value if isinstance(value, str) else literal(value)


def _plain(text: str) -> str:
    """As the name of a folder: nothing that a shell or a file system takes for something else."""
    return re.sub(r"[^\w.=,+-]+", "-", text).strip("-.")
