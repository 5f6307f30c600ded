"""Weights in a checkpoint of torchtitan: a folder of torch.distributed.checkpoint without a manifest.

Its tensors have the names that ours have, for Llama: flat ("layers.0.attention.wq.weight") since torchtitan 0.1, below
"model." before. Optimizer, learning rate and data lie beside them, partly as pickled objects, which are not read.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata

from trainer.checkpoint.local import LocalFolder
from trainer.checkpoint.manifest import MANIFEST_NAME, InvalidCheckpoint
from trainer.checkpoint.metadata import METADATA_NAME, read_metadata
from trainer.checkpoint.storage import CheckpointReader
from trainer.errors import ConfigurationError

_BESIDE = ("optimizer.", "lr_scheduler.", "dataloader.", "train_state.")
_FIRST_NAMES = "model."
_ROTATIONS = "freqs_cis"  # kept until early 2025, and worked out anew here


def is_torchtitan_folder(path: Path) -> bool:
    """Whether a folder holds a checkpoint of DCP that no manifest says to be ours."""
    return (path / METADATA_NAME).is_file() and not (path / MANIFEST_NAME).exists()


def open_torchtitan(path: Path) -> CheckpointReader:
    """A reader of the section "model". Raises ConfigurationError if it is damaged or not harmless."""
    folder = LocalFolder(path)
    try:
        return CheckpointReader(folder, _weights(read_metadata(folder, objects=True)))
    except InvalidCheckpoint as error:
        raise ConfigurationError(f"{path} cannot be read as a checkpoint of torchtitan: {error}") from error


def _weights(metadata: Metadata) -> Metadata:
    """What it says of weights, under their names in our checkpoints."""
    names = {}
    for name in metadata.state_dict_metadata:
        plain = name.removeprefix(_FIRST_NAMES)
        if not name.startswith(_BESIDE) and plain.rpartition(".")[2] != _ROTATIONS:
            names[name] = f"model.{plain}"
    if not names:
        raise InvalidCheckpoint("it holds no weights")
    tensors = {new: metadata.state_dict_metadata[old] for old, new in names.items()}
    places = {
        replace(index, fqn=names[index.fqn]): place
        for index, place in metadata.storage_data.items()
        if index.fqn in names
    }
    return Metadata(state_dict_metadata=tensors, storage_data=places)
