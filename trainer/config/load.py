"""The configuration of a run: a TOML file, then the command line over it, checked as a whole.

Imports neither torch nor datasets: a check takes a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainer.config.command_line import UNSET, CommandLine, parse
from trainer.config.describe import find_field, optional
from trainer.config.layers import CONFIGS, Files, find_file, read_files
from trainer.config.layers import shown as _shown
from trainer.config.legacy import SUBTABLES
from trainer.config.report import Given, Problem, Values, raise_for
from trainer.config.rules import check, notices
from trainer.config.schema import Config
from trainer.config.toml_file import TomlError
from trainer.config.translate import translate
from trainer.config.validate import validate

__all__ = ["CONFIGS", "DEFAULT", "Loaded", "config_to_toml", "given_to_toml", "load", "read_study_table"]

DEFAULT = "debug.toml"

_FREE_TABLE = "model.override"


@dataclass(frozen=True)
class Loaded:
    """A configuration and where it is from.

    Attributes:
        config: the effective configuration.
        path: the file.
        notices: sentences for the user: old spellings, settings that are odd but allowed.
        given: every given value by "table.key", with its source; for reports of problems.
    """

    config: Config
    path: Path
    notices: tuple[str, ...]
    given: Values

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return self.path.stem

    @property
    def dump_folder(self) -> Path:
        """The run's folder: configured, or outputs/<name>."""
        return Path(self.config.job.dump_folder or f"outputs/{self.name}")

    @property
    def shown_path(self) -> str:
        """The file as reports name it."""
        return _shown(self.path)


def load(argv: Sequence[str], chosen: Values | None = None) -> Loaded:
    """The configuration that the arguments name: `--config FILE` (else debug.toml), `--table.key value`, ...

    A bare file name that is not in the current folder is looked up in train_configs/. `--help` prints the help
    and exits. `chosen`: the values of one run, where the file is a study; they go before those of the file.

    Raises ConfigurationError with everything that is wrong, a line for each problem. Rules that concern the
    number of processes are not part of it: `trainer.config.rules`.
    """
    command_line = parse(argv)
    if command_line.wants_help:
        from trainer.config.help import render_help

        print(render_help(), end="")
        raise SystemExit(0)
    path, problems = _find(command_line.config)
    files = Files(({},), {})
    if path is not None:
        try:
            files = read_files(path, SUBTABLES | {_FREE_TABLE})
        except TomlError as error:
            problems.append(error.problem)
    if files.sweep and chosen is None:
        place = next(iter(files.sweep.values())).source.place
        problems.append(Problem((), f"is a study of several runs: stageline sweep {path}", place=place))
    layers = (*files.layers, chosen or {}, command_line.values)
    return _assemble(path or CONFIGS / DEFAULT, layers, command_line, problems)


def read_study_table(argv: Sequence[str]) -> Mapping[str, Given]:
    """The entries of the table [sweep] by "sweep.table.key", of the file that the arguments name; none if it has none.

    Nothing is raised: what is wrong with the file, `load` says.
    """
    path, _ = _find(parse(argv).config)
    try:
        return read_files(path, SUBTABLES | {_FREE_TABLE}).sweep if path is not None else {}
    except TomlError:
        return {}


def config_to_toml(config: Config) -> str:
    """The configuration as a TOML file that loads to an equal one. Keys that are unset are left out."""
    import tomli_w

    return tomli_w.dumps(config.model_dump(exclude_none=True))


def given_to_toml(loaded: Loaded) -> str:
    """What the files and the command line set, by today's keys, as a TOML file that loads to an equal configuration."""
    import tomli_w

    tables: dict[str, Any] = {table: {} for table in Config.model_fields}
    for key, given in loaded.given.items():
        *path, name = key.split(".")
        table = tables
        for part in path:
            table = table.setdefault(part, {})
        if given.value is not None and (path or given.value):
            table[name] = given.value
    return tomli_w.dumps({table: values for table, values in tables.items() if values})


def _assemble(
    path: Path, layers: Sequence[Values], command_line: CommandLine, problems: list[Problem]
) -> Loaded:
    translated = translate(*map(_expanded, layers))
    validated = validate(translated.values)
    problems += [*command_line.problems, *translated.problems, *validated.problems]
    if problems:
        # What else is wrong is said in the same report, unless it may follow from what is said already.
        doubtful = validated.wrong | {key for problem in translated.problems for key in problem.keys}
        doubtful |= {problem.suggestion for problem in problems if problem.suggestion}
        others = check(validated.config, None)
        problems += [problem for problem in others if doubtful.isdisjoint(problem.keys)]
    raise_for(problems, translated.given, _shown(path))
    said = (*translated.notices, *notices(validated.config))
    return Loaded(validated.config, path, said, translated.values)


def _expanded(values: Values) -> dict[str, Given]:
    """Entries of [model.override] one by one, also if they came as one inline table; "none" as what it means."""
    expanded: dict[str, Given] = {}
    for key, given in values.items():
        if key == _FREE_TABLE and isinstance(given.value, dict):
            for name, value in given.value.items():
                expanded[f"{key}.{name}"] = Given(value, given.source)
        elif given.value == UNSET and (field := find_field(key)) is not None and optional(field):
            expanded[key] = Given(None, given.source)
        else:
            expanded[key] = given
    return expanded


def _find(name: str | None) -> tuple[Path | None, list[Problem]]:
    if name is None:
        return CONFIGS / DEFAULT, []
    path, problem = find_file(name, Path())
    return path, [] if problem is None else [replace(problem, place=f"command line: --config {name}")]
