"""A TOML file as given values, each with the line of its key.

tomli reads the values but keeps no lines, so the keys are located by a second look at the text. It can be
simple, since it sees only files that tomli accepted: all it must know is where a value ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import tomli

from trainer.config.report import Given, Problem, Source

_SKIPPED = re.compile(r"(?:[\s]+|#[^\n]*)*")
_PART = re.compile(r"""[ \t]*(?:([A-Za-z0-9_-]+)|"((?:[^"\\]|\\.)*)"|'([^']*)')[ \t]*(\.)?""")
_VALUE = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'|#[^\n]*|[\[{]|[\]}]|\n|[^"\'#\[\]{}\n]+',
    re.DOTALL,
)


class TomlError(Exception):
    """The file cannot be read as TOML. `problem` says why and where."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def read_toml(path: Path, shown: str, tables: frozenset[str]) -> dict[str, Given]:
    """The values of a file by "table.key"; a key whose value is not in a table is given by its name alone.

    Tables deeper than `tables` names (dotted, such as "model.override") are one value, except those:
    their entries are "model.override.dim".

    Raises TomlError with file and line if the file is no TOML, cannot be read, or is not UTF-8.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
        document = tomli.loads(text)
    except OSError as error:
        raise TomlError(Problem((), f"cannot be read: {error.strerror}", place=shown)) from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise TomlError(Problem((), "is not UTF-8 text", place=f"{shown}:{line}")) from error
    except tomli.TOMLDecodeError as error:
        raise TomlError(
            Problem((), f"no valid TOML: {_reason(error)}", place=_place(shown, error))
        ) from error
    lines = key_lines(text)
    return {
        ".".join(key): Given(value, _source(shown, key, lines)) for key, value in _flatten(document, tables)
    }


def key_lines(text: str) -> dict[tuple[str, ...], int]:
    """The line, from 1, of each key and each table header of a valid TOML text."""
    lines: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    position = _end(_SKIPPED, text, 0)
    while position < len(text):
        line = text.count("\n", 0, position) + 1
        if text[position] == "[":
            table, position = _key(text, position + (2 if text.startswith("[[", position) else 1))
            lines.setdefault(table, line)
            position = text.index("]", position)
            position += 2 if text.startswith("]]", position) else 1
        else:
            name, position = _key(text, position)
            lines.setdefault(table + name, line)
            position = _end_of_value(text, text.index("=", position) + 1)
        position = _end(_SKIPPED, text, position)
    return lines


def _key(text: str, position: int) -> tuple[tuple[str, ...], int]:
    parts = []
    while match := _PART.match(text, position):
        parts.append(next(part for part in match.groups()[:3] if part is not None))
        position = match.end()
        if not match[4]:
            break
    return tuple(parts), position


def _end_of_value(text: str, position: int) -> int:
    depth = 0
    while match := _VALUE.match(text, position):
        token, position = match[0], match.end()
        if token in "[{":
            depth += 1
        elif token in "]}":
            depth -= 1
        elif token == "\n" and depth == 0:
            break
    return position


def _end(pattern: re.Pattern[str], text: str, position: int) -> int:
    match = pattern.match(text, position)
    return match.end() if match else position


def _flatten(document: dict[str, object], tables: frozenset[str]) -> Iterator[tuple[tuple[str, ...], object]]:
    for table, entries in document.items():
        if not isinstance(entries, dict):
            yield (table,), entries
            continue
        if not entries:
            yield (table,), entries
        for key, value in entries.items():
            yield from _entries((table, key), value, tables)


def _entries(
    key: tuple[str, ...], value: object, tables: frozenset[str]
) -> Iterator[tuple[tuple[str, ...], object]]:
    if ".".join(key) in tables and isinstance(value, dict):
        for name, each in value.items():
            yield from _entries((*key, name), each, tables)
    else:
        yield key, value


def _source(shown: str, key: tuple[str, ...], lines: dict[tuple[str, ...], int]) -> Source:
    # An entry of an inline table has no line of its own.
    line = next((lines[key[:length]] for length in range(len(key), 0, -1) if key[:length] in lines), 0)
    return Source(f"{shown}:{line}" if line else shown, ".".join(key), line=line)


def _reason(error: tomli.TOMLDecodeError) -> str:
    return re.sub(r" \(at .*\)$", "", str(error))


def _place(shown: str, error: tomli.TOMLDecodeError) -> str:
    line = re.search(r"\(at line (\d+), column \d+\)$", str(error))
    if line:
        return f"{shown}:{line[1]}"
    return f"{shown}:{getattr(error, 'lineno', '')}".rstrip(":")
