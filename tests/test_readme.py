"""The table of cases in tests/README.md names tests that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROW = re.compile(r"^\| ([PLDCO]\d+) \|.*\| ([^|]+) \|$", re.MULTILINE)
TABLE = dict(ROW.findall((TESTS / "README.md").read_text()))


def test_every_case_of_what_is_here_has_a_row() -> None:
    expected = {
        f"{kind}{number}" for kind, last in (("P", 15), ("L", 8), ("D", 9)) for number in range(1, last + 1)
    }
    assert set(TABLE) == expected | {"C1", "C2", "C3", "C4", "C5", "O1", "O2", "O3", "O4", "O5", "O6"}


@pytest.mark.parametrize("case", TABLE)
def test_the_tests_of_a_case_are_there(case: str) -> None:
    named = re.findall(r"`([^`]*)::(\w+)`", TABLE[case])
    assert named
    file = ""
    for path, name in named:
        file = path or file
        assert f"\ndef {name}(" in (TESTS / file).read_text(), f"{file}::{name}"
