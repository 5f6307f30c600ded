"""Node lists and counts as SLURM writes them into the environment, read without asking SLURM.

`node[01-03,07],gpu-a[1,3]b` names node01, node02, node03, node07, gpu-a1b, gpu-a3b; several brackets in one name
stand for every combination, the last one changing fastest. `2(x3),1` are the counts 2, 2, 2, 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

from trainer.errors import ConfigurationError

_BRACKET = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_COUNT = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


def expand_nodes(text: str) -> tuple[str, ...]:
    """The names of the nodes, in the order of the list. Raises ConfigurationError if it is no such list."""
    return tuple(name for item in _items(text) for name in _expand_item(item, text))


def expand_counts(text: str) -> tuple[int, ...]:
    """Counts for each node, e.g. SLURM_STEP_TASKS_PER_NODE. Raises ConfigurationError."""
    counts: list[int] = []
    for item in text.split(","):
        match = _COUNT.fullmatch(item)
        if match is None:
            raise ConfigurationError(
                f"environment: {text!r}: expected counts as SLURM writes them, e.g. 2(x3),1"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def _items(text: str) -> Iterator[str]:
    """The parts between those commas that stand outside brackets."""
    item, inside = "", False
    for character in text:
        if character == "," and not inside:
            yield item
            item = ""
        else:
            item += character
            inside = (inside or character == "[") and character != "]"
    yield item


def _expand_item(item: str, text: str) -> Iterator[str]:
    # What is before, in and after each bracket in turn: fixed, numbers, fixed, ..., fixed.
    parts = _BRACKET.split(item)
    fixed = parts[::2]
    if not item or any(character in part for part in fixed for character in "[]"):
        raise _no_list(text)
    choices = [_numbers(part, text) for part in parts[1::2]]
    for chosen in product(*choices):
        yield "".join(piece for pair in zip(fixed, (*chosen, ""), strict=True) for piece in pair)


def _numbers(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for each in ranges.split(","):
        match = _RANGE.fullmatch(each)
        if match is None:
            raise _no_list(text)
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise _no_list(text)
        numbers += [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
    return numbers


def _no_list(text: str) -> ConfigurationError:
    return ConfigurationError(
        f"environment: {text!r}: expected a list of nodes as SLURM writes them, e.g. node[01-03,07],gpu1"
    )
