"""The configuration of a run: a TOML file, then the command line over it, checked as a whole.

Imports neither torch nor datasets: a check takes a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.config.command_line import CommandLine, parse
from trainer.config.legacy import SUBTABLES
from trainer.config.report import Given, Problem, Values, nearest, raise_for
from trainer.config.rules import check, notices
from trainer.config.schema import Config
from trainer.config.toml_file import TomlError, read_toml
from trainer.config.translate import translate
from trainer.config.validate import validate

CONFIGS = Path(__file__).resolve().parents[2] / "train_configs"
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


def load(argv: Sequence[str]) -> Loaded:
    """The configuration that the arguments name: `--config FILE` (else debug.toml), `--table.key value`, ...

    A bare file name that is not in the current folder is looked up in train_configs/. `--help` prints the help
    and exits.

    Raises ConfigurationError with everything that is wrong, a line for each problem. Rules that concern the
    number of processes are not part of it: `trainer.config.rules`.
    """
    command_line = parse(argv)
    if command_line.wants_help:
        from trainer.config.help import render_help

        print(render_help(), end="")
        raise SystemExit(0)
    path, problems = _find(command_line.config)
    file: dict[str, Given] = {}
    if path is not None:
        try:
            file = read_toml(path, _shown(path), SUBTABLES | {_FREE_TABLE})
        except TomlError as error:
            problems.append(error.problem)
    return _assemble(path or CONFIGS / DEFAULT, file, command_line, problems)


def config_to_toml(config: Config) -> str:
    """The configuration as a TOML file that loads to an equal one. Keys that are unset are left out."""
    import tomli_w

    return tomli_w.dumps(config.model_dump(exclude_none=True))


def _assemble(
    path: Path, file: dict[str, Given], command_line: CommandLine, problems: list[Problem]
) -> Loaded:
    translated = translate(file, _expanded(command_line.values))
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
    """Entries of [model.override] one by one, also if they came as one inline table."""
    expanded: dict[str, Given] = {}
    for key, given in values.items():
        if key == _FREE_TABLE and isinstance(given.value, dict):
            for name, value in given.value.items():
                expanded[f"{key}.{name}"] = Given(value, given.source)
        else:
            expanded[key] = given
    return expanded


def _find(name: str | None) -> tuple[Path | None, list[Problem]]:
    if name is None:
        return CONFIGS / DEFAULT, []
    path = Path(name).expanduser()
    if path.is_file():
        return path, []
    bare = path.name == name
    if bare and (CONFIGS / name).is_file():
        return CONFIGS / name, []
    folder = CONFIGS if bare else path.parent
    there = sorted(each.name for each in folder.glob("*.toml")) if folder.is_dir() else []
    near = nearest(path.name, there, cutoff=0.5)
    listed = f"{', '.join(there)} in {_shown(folder)}" if there else None
    what = "is a folder" if path.is_dir() else "there is no such file"
    suggestion = None if near is None else near if bare else str(path.parent / near)
    return None, [Problem((), what, listed, suggestion, place=f"command line: --config {name}")]


def _shown(path: Path) -> str:
    """Relative to the current folder where it is inside."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
