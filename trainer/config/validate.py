"""Given values into a Config, or into problems: every one of them, in our words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from trainer.config.describe import allowed, choices, fields, find_field, literal, read_literal, tables
from trainer.config.report import Problem, Values, nearest
from trainer.config.schema import Config

_KINDS = {
    bool: "a boolean",
    int: "an integer",
    float: "a float",
    str: "a string",
    list: "a list",
    dict: "a table",
}
_NEEDED = {
    "int_type": "integer",
    "float_type": "number",
    "bool_type": "boolean",
    "string_type": "string",
    "tuple_type": "list",
    "mapping_type": "table",
}
_OUT_OF_BOUNDS = {
    "greater_than_equal": "is too small",
    "greater_than": "is too small",
    "less_than_equal": "is too large",
    "less_than": "is too large",
    "finite_number": "is not finite",
    "literal_error": "is not a choice",
    "string_too_short": "is empty",
    "too_short": "has too few entries",
    "too_long": "has too many entries",
    "missing": "has too few entries",
}


@dataclass(frozen=True)
class Validated:
    """The configuration, with defaults in place of the `wrong` keys, and the problems of those."""

    config: Config
    problems: tuple[Problem, ...]
    wrong: frozenset[str]


def validate(given: Values) -> Validated:
    """Check every value against its field."""
    values = dict(given)
    problems: list[Problem] = []
    wrong: set[str] = set()
    while True:
        try:
            return Validated(Config.model_validate(_nested(values)), tuple(problems), frozenset(wrong))
        except ValidationError as error:
            found = [
                _problem(each["loc"], each["type"], each["msg"], values)
                for each in error.errors(include_url=False, include_context=False)
            ]
            problems += found
            bad = {key for problem in found for key in problem.keys}
            wrong |= bad
            # Again with defaults for these: a table that is no table at all hides nothing any more.
            values = {key: value for key, value in values.items() if key not in bad}


def unknown_key(key: str) -> Problem:
    """The problem of a key, or a table, that does not exist."""
    table, _, name = key.partition(".")
    full = [known_key for known_key, _ in fields()]
    if not name:
        elsewhere = _same_name(table, full)
        near = elsewhere or nearest(table, tables())
        return Problem((key,), "unknown table" if near in tables() else "unknown key", suggestion=near)
    if table not in tables():
        return Problem((key,), f"unknown table [{table}]", suggestion=_in_other_table(key, name, full))
    siblings = [each.partition(".")[2] for each in full if each.startswith(f"{table}.")]
    near = nearest(name, siblings, cutoff=0.7)
    suggestion = f"{table}.{near}" if near else _same_name(name, full) or _weaker(table, name, siblings, full)
    return Problem((key,), "unknown key", suggestion=suggestion)


def _same_name(name: str, full: list[str]) -> str | None:
    return next((each for each in full if each.partition(".")[2] == name.replace("-", "_")), None)


def _weaker(table: str, name: str, siblings: list[str], full: list[str]) -> str | None:
    near = nearest(name, siblings, cutoff=0.5)
    return f"{table}.{near}" if near else nearest(f"{table}.{name}", full, cutoff=0.7)


def _in_other_table(key: str, name: str, full: list[str]) -> str | None:
    table = nearest(key.partition(".")[0], tables())
    if table is not None:
        keys = [each.partition(".")[2] for each in full if each.startswith(f"{table}.")]
        near = nearest(name, keys)
        return f"{table}.{near}" if near else table
    return _same_name(name, full) or nearest(key, full)


def _nested(values: Values) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for key, given in values.items():
        *path, last = key.split(".")
        table = document
        for part in path:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                break
        else:
            if given.value != {} or last not in table:
                table[last] = given.value
    return document


def _problem(location: tuple[int | str, ...], kind: str, message: str, values: Values) -> Problem:
    names = [part for part in location if isinstance(part, str)]
    key = _given_key(".".join(names), names[0], values)
    if kind == "extra_forbidden":
        return unknown_key(key)
    if kind in ("model_type", "model_attributes_type", "mapping_type") and "." not in key:
        return Problem((key,), "a table is expected, not a single value", f"[{key}] and keys below it")
    field = find_field(key)
    assert field is not None
    value = values[key].value
    in_entry = any(isinstance(part, int) for part in location) and kind != "missing"
    return Problem((key,), _what(kind, message, value, in_entry), allowed(field), _meant(field, key, value))


def _given_key(key: str, table: str, values: Values) -> str:
    """The key as it was given: pydantic's may be above or below it, if a value stands where a table should."""
    if key in values:
        return key
    return next(each for each in values if each == table or each.startswith(f"{key}."))


def _what(kind: str, message: str, value: object, in_entry: bool) -> str:
    if kind in _OUT_OF_BOUNDS:
        return f"holds an entry that {_OUT_OF_BOUNDS[kind]}" if in_entry else _OUT_OF_BOUNDS[kind]
    if kind in _NEEDED:
        needed = _NEEDED[kind]
        if in_entry:
            return f"holds an entry that is no {needed}"
        return f"{_KINDS.get(type(value), 'this')} is no {needed}"
    return message


def _meant(field: Any, key: str, value: object) -> str | None:
    """The value that was probably meant, if there is one that is allowed."""
    if not isinstance(value, str):
        return None
    if names := choices(field):
        near = nearest(value, names)
        return literal(near) if near else None
    unquoted = read_literal(value)
    if isinstance(unquoted, str):
        return None
    table, _, name = key.partition(".")
    try:
        Config.model_validate({table: {name: unquoted}})
    except ValidationError:
        return None
    return literal(unquoted)
