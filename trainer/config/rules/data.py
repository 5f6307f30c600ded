"""Rules of the data keys in [training] and [validation], and of the tokenizer."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer.config.report import Problem, nearest
from trainer.config.rules.pipeline import nearest_file
from trainer.config.schema import Config
from trainer.data.sources import LOCAL, MEGATRON, PYTHON_DOCS

_BYTE_TOKENIZER = "byte"


@dataclass(frozen=True)
class _Dataset:
    """A data set that a table names."""

    table: str
    name: str
    path: str | None

    list_of: str | None = None  # the key of the list that it is an entry of

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.list_of or f"{self.table}.dataset",)

    @property
    def path_keys(self) -> tuple[str, ...]:
        return self.keys if self.list_of else (f"{self.table}.dataset_path", *self.keys)


def dataset_is_known(config: Config, _world_size: int | None) -> Iterator[Problem]:
    """A data set is one of ours or a name on the hub; what is nearly one of ours is a slip."""
    for used in _datasets(config):
        near = nearest(used.name, LOCAL, cutoff=0.75)
        if used.name not in LOCAL and near and "/" not in used.name and not used.path:
            allowed = f"{', '.join(LOCAL)}, or a data set of the Hugging Face hub, owner/name"
            yield Problem(used.keys, "there is no such data set", allowed, f'"{near}"', used.name)


def dataset_path_is_given_where_needed(config: Config, _world_size: int | None) -> Iterator[Problem]:
    """Local files need a path, and the text that ships with Python has none."""
    for used in _datasets(config):
        if used.name == PYTHON_DOCS and used.path:
            yield Problem(
                used.path_keys,
                f'{used.table}.dataset = "{PYTHON_DOCS}" is the text that ships with Python and is read from there',
                f"no path, or {used.table}.dataset one of {', '.join(name for name in LOCAL if name != PYTHON_DOCS)}",
            )
        elif used.name in LOCAL and used.name != PYTHON_DOCS and not used.path:
            message = f"needs {used.table}.dataset_path: a file, a folder or a pattern"
            yield Problem(tuple(dict.fromkeys((*used.keys, *used.path_keys))), message, value=used.name)


def names_of_data_differ(config: Config, _world_size: int | None) -> Iterator[Problem]:
    """A checkpoint and the metrics tell the sources of a mixture, and validation sets, by their names."""
    for key, entries in (("data.sources", config.data.sources), ("validation.sets", config.validation.sets)):
        names = [each.name for each in entries]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield Problem((key,), f"has {names.count(name)} entries of the name {name}", "a name for each")


def data_is_named_once(config: Config, _world_size: int | None) -> Iterator[Problem]:
    """With a list of sources or sets, the keys of the single one say nothing."""
    training, checked = config.training, config.validation
    single = {"dataset", "dataset_path", "text_column"}
    untouched = type(training)().model_dump(include=single)
    if config.data.sources and training.model_dump(include=single) != untouched:
        yield Problem(
            (*(f"training.{key}" for key in sorted(single)), "data.sources"),
            "says nothing beside data.sources",
            "one of them",
        )
    if checked.sets and (checked.dataset or checked.dataset_path):
        yield Problem(
            ("validation.dataset", "validation.dataset_path", "validation.sets"),
            "says nothing beside validation.sets",
            "one of them",
        )


def tokenizer_path_exists(config: Config, _world_size: int | None) -> Iterator[Problem]:
    """The tokenizer's file, or the folder with it, is there."""
    name = config.model.tokenizer_path
    if name is None or name == _BYTE_TOKENIZER or Path(name).expanduser().exists():
        return
    yield Problem(
        ("model.tokenizer_path",),
        "there is no such file",
        'a tokenizer file, "byte", or unset for one trained on the corpus',
        nearest(name, [_BYTE_TOKENIZER]) or nearest_file(name),
    )


def dataset_path_exists(config: Config, _world_size: int | None) -> Iterator[Problem]:
    """The path of local files leads to some."""
    for used in _datasets(config):
        # With a hub name the path may be one of the hub's, too.
        if used.path is None or used.name not in LOCAL or used.name == PYTHON_DOCS:
            continue
        path = str(Path(used.path).expanduser())
        if used.name == MEGATRON and Path(f"{path}.idx").exists():
            continue  # its users name both files without their endings
        if not Path(path).exists() and not glob.glob(path, recursive=True):
            what = "no file matches" if glob.has_magic(path) else "there is no such file or folder"
            yield Problem(used.path_keys, what, suggestion=nearest_file(used.path))


def _datasets(config: Config) -> Iterator[_Dataset]:
    training, validation = config.training, config.validation
    for source in config.data.sources:
        yield _Dataset("data.sources", source.dataset, source.dataset_path, "data.sources")
    if not config.data.sources:
        yield _Dataset("training", training.dataset, training.dataset_path)
    if not validation.enable:
        return
    for held_out in validation.sets:
        yield _Dataset("validation.sets", held_out.dataset, held_out.dataset_path, "validation.sets")
    # Validation without keys of its own reads what training reads.
    if validation.dataset or validation.dataset_path:
        yield _Dataset("validation", validation.dataset or training.dataset, validation.dataset_path)
