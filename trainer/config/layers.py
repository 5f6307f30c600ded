"""A configuration file and the files that it builds on: `extends = "base.toml"` at its top.

    extends = "base.toml"                       # relative to this file, or a name in train_configs/
    extends = ["llama_8b.toml", "cluster.toml"]  # later ones go before earlier ones

Tables are merged key by key, the file itself going before what it builds on; a list takes the place of the former
one, unless "..." is among its entries, which stands for the entries of the former one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.config.report import Given, Problem, nearest
from trainer.config.toml_file import TomlError, read_toml

CONFIGS = Path(__file__).resolve().parents[2] / "train_configs"
EXTENDS = "extends"
SWEEP = "sweep"
FORMER_ENTRIES = "..."


@dataclass(frozen=True)
class Files:
    """What the files give.

    Attributes:
        layers: values of each file by "table.key", with today's or old spellings, the first one to be built upon.
        sweep: the entries of the table [sweep] of the file itself: what makes it a study.
    """

    layers: tuple[dict[str, Given], ...]
    sweep: Mapping[str, Given]


def read_files(path: Path, tables: frozenset[str]) -> Files:
    """A file with all that it builds on. `tables`: as for `read_toml`.

    Raises TomlError with the place if one is missing, no TOML, or builds on itself.
    """
    layers = _read(path, tables, ())
    sweep = {key: given for key, given in layers[-1].items() if _is_sweep(key)}
    values = tuple({key: given for key, given in layer.items() if not _is_sweep(key)} for layer in layers)
    return Files(values, sweep)


def find_file(name: str, beside: Path) -> tuple[Path | None, Problem | None]:
    """The file of that name in a folder, or, for a name alone, in train_configs/; else what is wrong with it."""
    path = beside / Path(name).expanduser()
    if path.is_file():
        return path, None
    bare = Path(name).name == name
    if bare and (CONFIGS / name).is_file():
        return CONFIGS / name, None
    folder = CONFIGS if bare else path.parent
    there = sorted(each.name for each in folder.glob("*.toml")) if folder.is_dir() else []
    near = nearest(path.name, there, cutoff=0.5)
    listed = f"{', '.join(there)} in {shown(folder)}" if there else None
    what = "is a folder" if path.is_dir() else "there is no such file"
    suggestion = None if near is None else near if bare else str(Path(name).parent / near)
    return None, Problem((), what, listed, suggestion)


def shown(path: Path) -> str:
    """A path as reports name it: relative to the current folder where it is inside."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _read(path: Path, tables: frozenset[str], above: tuple[Path, ...]) -> list[dict[str, Given]]:
    values = read_toml(path, shown(path), tables)
    bases = values.pop(EXTENDS, None)
    layers: list[dict[str, Given]] = []
    for name in _names(bases):
        base, problem = find_file(name, path.parent)
        line = f"{bases.source.place if bases else path}: {EXTENDS} = {name!r}"
        if base is None:
            raise TomlError(replace(problem, place=line) if problem else Problem((), "not found", place=line))
        family = (*above, path)
        if base.resolve() in (each.resolve() for each in family):
            chain = " → ".join(shown(each) for each in (*family, base))
            raise TomlError(Problem((), f"builds on itself: {chain}", place=line))
        layers += _read(base, tables, family)
    return [*layers, values]


def _names(bases: Given | None) -> list[str]:
    if bases is None:
        return []
    names = bases.value if isinstance(bases.value, list) else [bases.value]
    if not names or not all(isinstance(name, str) and name for name in names):
        place = f"{bases.source.place}: {EXTENDS}"
        raise TomlError(Problem((), "names no file", "a file, or a list of files", place=place))
    return [str(name) for name in names]


def _is_sweep(key: str) -> bool:
    return key == SWEEP or key.startswith(f"{SWEEP}.")
