"""A model in a Hugging Face folder, opened: its sizes, and its weights as ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.family import Family
from trainer.weights.folder import HuggingFaceFolder, open_folder
from trainer.weights.naming import format_of
from trainer.weights.naming import sizes_of as sizes_of_config
from trainer.weights.source import HuggingFaceSource, SourceReader


@dataclass(frozen=True)
class HuggingFaceModel:
    """A folder whose tensors have all been found, none of which has been read."""

    folder: HuggingFaceFolder
    sizes: Any
    source: HuggingFaceSource

    @property
    def reader(self) -> SourceReader:
        """Fills the tensors of a model, sharded or not: `reader.read_into("model", model.state_dict())`."""
        return SourceReader(self.source, self.folder.path)


def open_model(path: Path, sizes: Any = None, among: Sequence[Family] | None = None) -> HuggingFaceModel:
    """Open a folder.

    Args:
        path: the folder.
        sizes: of the model whose weights are wanted; None: as `config.json` says. Shapes must agree.
        among: the families that it can be of; None: those in the registry.

    Raises:
        ConfigurationError: the folder holds no such model, or files that are broken or that Stageline does not read.
    """
    folder = open_folder(path)
    form = format_of(folder.config, path, among)
    if sizes is None:
        sizes = sizes_of_config(folder.config, path, among)
    source = HuggingFaceSource(folder, form.weights_of(sizes), lambda name: form.is_left_out(sizes, name))
    return HuggingFaceModel(folder, sizes, source)
