"""A family at a place: found by module and by path; what is not one is refused in one line that says why."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from models.external import FamilyNotFound, family_at
from models.registry import UnknownModelError, family
from tests.config.reports import rules_broken

GOOD = """
from models.family import Family
from models.llama.sizes import LLAMA3

MINE = Family("mine", LLAMA3, package="models.llama")
NUMBER = 3
"""


@pytest.fixture(autouse=True)
def path_as_before() -> Iterator[None]:
    before, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = before
    for name in set(sys.modules) - modules:
        if name.startswith("somebodys_"):
            del sys.modules[name]


def write(folder: Path, text: str, name: str = "somebodys_model.py") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_family_is_found_in_a_file_a_package_and_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert family(f"{write(tmp_path / 'a', GOOD)}:MINE").name == "mine"
    package = write(tmp_path / "b", GOOD, "somebodys_package/__init__.py").parent
    assert family(f"{package}:MINE").name == "mine"
    monkeypatch.chdir(tmp_path / "b")
    assert family("./somebodys_package:MINE").name == "mine"
    write(tmp_path / "c", GOOD, "somebodys_other/inner.py")
    monkeypatch.syspath_prepend(tmp_path / "c")
    assert family("somebodys_other.inner:MINE").name == "mine"


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        (GOOD, "YOURS", "has no YOURS; it has MINE"),
        (GOOD, "NUMBER", "NUMBER of .* is a int and no Family; it has MINE"),
        ("x = 1", "MINE", "has no MINE; it has no Family"),
        ("import nothing_of_this_name", "MINE", "cannot be imported: ModuleNotFoundError: No module named"),
        ("x =", "MINE", "cannot be imported: SyntaxError"),
        ("raise RuntimeError('one\\ntwo')", "MINE", "cannot be imported: RuntimeError: one two$"),
    ],
)
def test_what_is_no_family_is_refused_with_the_reason_in_one_line(
    tmp_path: Path, text: str, name: str, says: str
) -> None:
    with pytest.raises(UnknownModelError, match=says) as caught:
        family(f"{write(tmp_path, text)}:{name}")
    assert "\n" not in str(caught.value)


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FamilyNotFound, match=r"there is no file .*nowhere\.py, nor a package"):
        family_at(f"{tmp_path}/nowhere.py:MINE")
    with pytest.raises(FamilyNotFound, match=r"no\.such\.module cannot be imported: ModuleNotFoundError"):
        family_at("no.such.module:MINE")


def test_a_file_called_as_a_module_that_is_there_is_not_confused_with_it(tmp_path: Path) -> None:
    with pytest.raises(FamilyNotFound, match="another module is called models"):
        family_at(f"{write(tmp_path, GOOD, 'models.py')}:MINE")


def test_a_configuration_with_such_a_model_is_refused_in_one_line_or_passes(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    assert rules_broken("--model.name", f"{path}:MINE", "--model.flavor", "debug") == []
    (line,) = rules_broken("--model.name", f"{path}:YOURS")
    assert "--model.name" in line
    assert "has no YOURS; it has MINE" in line
    (line,) = rules_broken("--model.name", f"{path}:MINE", "--model.flavor", "debugg")
    assert "did you mean debug?" in line
    (line,) = rules_broken("--model.name", "my_model")
    assert "package.module:FAMILY" in line
