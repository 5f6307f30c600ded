"""A folder with a model in Hugging Face's form: its configuration, and where in which file each tensor lies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import ConfigurationError
from trainer.weights.safetensors_format import Entry, read_header

CONFIG_NAME = "config.json"
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


@dataclass(frozen=True)
class Located:
    """One tensor and the file that holds it."""

    path: Path
    entry: Entry


@dataclass(frozen=True)
class HuggingFaceFolder:
    """What the folder says of itself; nothing of the tensors has been read.

    Attributes:
        path: the folder.
        config: its `config.json`.
        tensors: every tensor of its files, by name.
    """

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Located]

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold tensors."""
        return tuple(dict.fromkeys(located.path for located in self.tensors.values()))


def is_hugging_face_folder(path: Path) -> bool:
    """Whether a path is a folder of that form rather than a run folder or a checkpoint."""
    return (path / CONFIG_NAME).is_file()


def read_config(path: Path) -> dict[str, Any]:
    """The folder's `config.json`. Raises ConfigurationError."""
    if not path.is_dir():
        raise ConfigurationError(f"{path}: no such folder")
    if not (path / CONFIG_NAME).is_file():
        hint = ""
        if any(path.glob("consolidated.*.pth")):
            hint = "; it holds Meta's own files: stageline import-meta"
        raise ConfigurationError(f"{path} holds no {CONFIG_NAME}, so it is no Hugging Face folder{hint}")
    return _read_json(path / CONFIG_NAME)


def open_folder(path: Path) -> HuggingFaceFolder:
    """Read configuration, index and headers, and check that they agree.

    Raises ConfigurationError, with the file and the reason, for files that are missing, broken, or no safetensors.
    """
    config = read_config(path)
    if (path / INDEX_NAME).is_file():
        return HuggingFaceFolder(path, config, _by_index(path))
    if (path / SINGLE_NAME).is_file():
        file = path / SINGLE_NAME
        return HuggingFaceFolder(path, config, {n: Located(file, e) for n, e in read_header(file).items()})
    pickles = [name for name in _PICKLES if (path / name).is_file()]
    if pickles:
        raise ConfigurationError(
            f"{path} holds {pickles[0]}, a pickle, which could run anything when it is read; "
            "Stageline reads safetensors only: save the model with transformers' save_pretrained first"
        )
    raise ConfigurationError(f"{path} holds neither {SINGLE_NAME} nor {INDEX_NAME}")


def _by_index(path: Path) -> dict[str, Located]:
    index = path / INDEX_NAME
    listed = _read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ConfigurationError(f"{index} lists no tensors in weight_map")
    tensors: dict[str, Located] = {}
    for name in listed.values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ConfigurationError(f"{index} names {name!r}, which is no safetensors file of the folder")
    absent = [name for name in listed.values() if not (path / name).is_file()]
    if absent:
        raise ConfigurationError(f"{index} names {absent[0]}, which is not there")
    for name in dict.fromkeys(listed.values()):
        for tensor, entry in read_header(path / name).items():
            if listed.get(tensor) != name:
                raise ConfigurationError(
                    f"{path / name} holds {tensor}, which {INDEX_NAME} does not have there"
                )
            tensors[tensor] = Located(path / name, entry)
    missing = [name for name in listed if name not in tensors]
    if missing:
        raise ConfigurationError(
            f"{path / listed[missing[0]]} lacks {missing[0]}, which {INDEX_NAME} has there"
        )
    return tensors


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigurationError(f"{path} is no table")
    return value
