"""Where values come from, what can be wrong with them, and the report of it: one line for each problem.

train_configs/my.toml:14: training.batchsize = 8: unknown key; did you mean training.batch_size?
command line: --training.steps many: a string is not an integer; allowed: integer ≥ 1
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trainer.config.describe import literal
from trainer.errors import ConfigurationError

_LONGEST_VALUE = 60


@dataclass(frozen=True)
class Source:
    """Where a value was given and how: `spelling` is the key as written there, `text` the value as typed.

    `line` is 0 where it is not known.
    """

    place: str
    spelling: str
    text: str | None = None
    on_command_line: bool = False
    line: int = 0

    def __str__(self) -> str:
        return f"{self.place}: {self.spelling}"


@dataclass(frozen=True)
class Given:
    """A value that a file or the command line gives."""

    value: object
    source: Source


Values = Mapping[str, Given]
"""Given values by "table.key"."""


@dataclass(frozen=True)
class Problem:
    """Something wrong. `keys` are the keys that take part, the one to be shown first.

    `allowed` and `suggestion` are for the end of the line; `place` overrides where it is (for problems that
    are about no key).
    """

    keys: tuple[str, ...]
    message: str
    allowed: str | None = None
    suggestion: str | None = None
    value: object = None
    place: str | None = None

    def line(self, given: Values, file: str | None = None) -> str:
        """The problem as one line, located by where its keys were given; `file` is for keys that were not."""
        located = (
            f"{self._location(given, file)}: {self.message}" if self.keys or self.place else self.message
        )
        if self.allowed:
            located += f"; allowed: {self.allowed}"
        if self.suggestion:
            located += f"; did you mean {self.suggestion}?"
        return " ".join(located.split())

    def _location(self, given: Values, file: str | None) -> str:
        if self.place is not None:
            return self.place
        # A default cannot be found in a file, so a key that was given is shown rather than one that was not.
        key = next((each for each in self.keys if each in given), self.keys[0])
        if key not in given:
            shown = f"{key} = {shorten(literal(self.value))}" if self.value is not None else key
            return f"{file}: {shown}" if file else shown
        source, value = given[key].source, given[key].value
        if source.on_command_line:
            return f"{source}{'' if source.text is None else f' {shorten(source.text)}'}"
        return f"{source} = {shorten(literal(value))}"


def shorten(text: str) -> str:
    """At most a few words of a long value."""
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that is most like `name`, if any is like it; upper and lower case do not matter."""
    plain: dict[str, str] = {}
    for each in known:
        plain.setdefault(each.lower(), each)
    found = difflib.get_close_matches(name.lower().replace("-", "_"), list(plain), n=1, cutoff=cutoff)
    return plain[found[0]] if found else None


def nearest_number(value: int, allowed: Sequence[int]) -> int:
    """The allowed number that is closest to `value`, the smaller of two."""
    return min(sorted(allowed), key=lambda each: abs(each - value))


def either(numbers: Sequence[int]) -> str:
    """Numbers to choose from, in words."""
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last


def raise_for(problems: Iterable[Problem], given: Values, file: str | None = None) -> None:
    """Raise ConfigurationError with the whole report, if there is anything to report.

    In order: the file by line, the command line, what is about no single value.
    """
    ordered = sorted(problems, key=lambda problem: _order(problem, given))
    if ordered:
        raise ConfigurationError("\n".join(dict.fromkeys(problem.line(given, file) for problem in ordered)))


def _order(problem: Problem, given: Values) -> tuple[int, int]:
    key = next((each for each in problem.keys if each in given), None)
    if key is None:
        return (2, 0)
    return (int(given[key].source.on_command_line), given[key].source.line)
