"""The command line as given values: --table.key value, --table.key=value, and a bare --table.key for true.

Generated from the classes of the schema, like the help. Neither argparse nor the command-line source of
pydantic-settings is used, for what they do with mistakes, which is what most command lines are about: both end
at the first one, know neither the nearest key nor where a value came from, and take `-1e-3` for an option; a
bare `--flag`, a list in TOML and the free table [model.override] would each need a way around them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trainer.config.describe import allowed, core_type, find_field, optional, read_literal
from trainer.config.report import Given, Problem, Source

PLACE = "command line"
UNSET = "none"


@dataclass
class CommandLine:
    """What the arguments say. `values` is by "table.key" as spelled there, known or not."""

    values: dict[str, Given] = field(default_factory=dict)
    config: str | None = None
    wants_help: bool = False
    problems: list[Problem] = field(default_factory=list)


def parse(argv: Sequence[str]) -> CommandLine:
    """Read the arguments. Nothing is raised: what is wrong is in `problems`. Of a repeated key the last counts."""
    line = CommandLine()
    at = 0
    while at < len(argv):
        word = argv[at]
        at += 1
        if word in ("-h", "--help"):
            line.wants_help = True
            continue
        if not word.startswith("--") or word == "--":
            line.problems.append(_stray(word))
            continue
        name, equals, text = word[2:].partition("=")
        value: str | None = text if equals else None
        if value is None and at < len(argv) and not _is_option(argv[at]):
            value = argv[at]
            at += 1
        if name in ("config", "job.config_file"):
            _take_config(line, name, value)
        else:
            _take(line, name, value)
    return line


def _is_option(word: str) -> bool:
    return word.startswith("--") or word == "-h"


def _stray(word: str) -> Problem:
    hint = f"--config {word}" if word.endswith(".toml") else None
    return Problem(
        (), f"{word}: belongs to no key; a key is written --table.key value", None, hint, place=PLACE
    )


def _take_config(line: CommandLine, name: str, value: str | None) -> None:
    if value:
        line.config = value
        return
    line.problems.append(
        Problem((), f"--{name}: needs a value", "a TOML file, or a name in train_configs", place=PLACE)
    )


def _take(line: CommandLine, name: str, text: str | None) -> None:
    known = find_field(name)
    source = Source(PLACE, f"--{name}", text, on_command_line=True)
    if text is None:
        if known is None or core_type(known) is bool:
            line.values[name] = Given(True, source)
        else:
            line.problems.append(Problem((), f"--{name}: needs a value", allowed(known), place=PLACE))
    elif known is None:
        line.values[name] = Given(read_literal(text), source)
    elif optional(known) and text.lower() == UNSET:
        line.values[name] = Given(None, source)
    else:
        line.values[name] = Given(text if core_type(known) is str else read_literal(text), source)
