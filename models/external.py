"""Families that live outside of the repository, named by where they are. No torch here.

A place is `package.module:NAME`, of something that Python can import, or `folder/module.py:NAME` or
`folder/package:NAME`, whose folder is then looked in as well, as that of a script is.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from models.family import Family


class FamilyNotFound(ValueError):
    """There is no family at the place."""


def is_place(name: str) -> bool:
    """Whether a name says where a family is, and is not that of one of ours."""
    return ":" in name


def family_at(place: str) -> Family:
    """The family at a place. Raises FamilyNotFound, with the reason in one line."""
    where, _, name = place.rpartition(":")
    module = _import_path(Path(where)) if "/" in where or where.endswith(".py") else _import(where)
    found = getattr(module, name, None)
    if isinstance(found, Family):
        return found
    families = [key for key, value in vars(module).items() if isinstance(value, Family)]
    has = f"it has {', '.join(families)}" if families else "it has no Family"
    if hasattr(module, name):
        raise FamilyNotFound(f"{name} of {where} is a {type(found).__name__} and no Family; {has}")
    raise FamilyNotFound(f"{where} has no {name}; {has}")


def _import_path(path: Path) -> ModuleType:
    if not path.is_file() and not (path / "__init__.py").is_file():
        raise FamilyNotFound(f"there is no file {path}, nor a package")
    whole = path.resolve()
    if str(whole.parent) not in sys.path:
        sys.path.append(str(whole.parent))
    module = _import(whole.stem)
    expected = whole / "__init__.py" if whole.is_dir() else whole
    if module.__file__ is None or Path(module.__file__).resolve() != expected:
        raise FamilyNotFound(f"{path} cannot be imported: another module is called {whole.stem}")
    return module


def _import(module: str) -> ModuleType:
    try:
        return import_module(module)
    except Exception as error:  # whatever somebody else's module raises
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise FamilyNotFound(f"{module} cannot be imported: {reason}") from error
