"""Writing and reading the files of one checkpoint with torch.distributed.checkpoint.

Reading runs nothing that the files contain: tensors are loaded weights-only, and the one pickled file, DCP's
`.metadata`, passes an unpickler that knows only the classes which describe tensors. Every rank reads what it
needs by itself, without a collective and without a process group, so one that fails leaves nobody waiting.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.utils import _create_file_view

from trainer.checkpoint.agreement import FailedOnSomeRank, describe
from trainer.checkpoint.manifest import InvalidCheckpoint
from trainer.checkpoint.state import StateDict
from trainer.errors import ConfigurationError

METADATA_NAME = ".metadata"

_ALLOWED = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "pathlib": {"Path", "PosixPath", "WindowsPath"},
    "pathlib._local": {"Path", "PosixPath", "WindowsPath"},  # as Python 3.13 writes them
}


def write_tensors(folder: Path, tensors: StateDict, group: dist.ProcessGroup | None) -> None:
    """Write the tensors of all ranks into an existing, empty folder, synchronised to disk.

    Collective over `group` if there is one. Raises FailedOnSomeRank on all ranks if one of them cannot write.
    """
    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    with warnings.catch_warnings():
        # Without a process group the warning says that one process saves: as intended.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            save(tensors, storage_writer=writer, process_group=group, no_dist=group is None)
        except CheckpointException as error:
            # DCP has told all ranks. Its own text is the traceback of every rank that failed.
            rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
            raise FailedOnSomeRank(f"rank {rank}: {describe(cause)}") from error


def files_of_rank(folder: Path, rank: int) -> list[str]:
    """Names of the files that `write_tensors` wrote on a rank; rank 0 wrote the metadata too."""
    names = sorted(path.name for path in folder.glob(f"__{rank}_*"))
    return [*names, METADATA_NAME] if rank == 0 else names


class CheckpointReader:
    """The tensors of one checkpoint, whose files have been verified before."""

    def __init__(self, folder: Path) -> None:
        """Raises InvalidCheckpoint if the description of its tensors cannot be read or is not harmless."""
        self._folder = folder
        self._metadata = _read_metadata(folder / METADATA_NAME)

    def names(self, section: str) -> set[str]:
        """Names of the saved tensors of a section, e.g. "model"."""
        prefix = f"{section}."
        return {name.removeprefix(prefix) for name in self._saved if name.startswith(prefix)}

    def read_into(self, section: str, tensors: Mapping[str, Tensor]) -> None:
        """Fill tensors (plain ones, or DTensors of any layout) in place; types are converted as copying does.

        Raises:
            ConfigurationError: a tensor is not in the checkpoint, or has another shape there.
        """
        self._check_shapes(section, tensors)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load({section: dict(tensors)}, storage_reader=_Reader(self._folder, self._metadata), no_dist=True)

    def shape(self, section: str, name: str) -> tuple[int, ...]:
        """The shape of a saved tensor."""
        return tuple(self._saved[f"{section}.{name}"].size)

    def dtype(self, section: str, name: str) -> torch.dtype:
        """The number format of a saved tensor."""
        return self._saved[f"{section}.{name}"].properties.dtype

    def read(self, section: str, name: str) -> Tensor:
        """The whole of a saved tensor, in its own number format. Memory: the tensor and its largest saved part."""
        full_name = f"{section}.{name}"
        saved = self._saved[full_name]
        whole = None
        for chunk in saved.chunks:
            part = self._read_chunk(MetadataIndex(full_name, chunk.offsets))
            if len(saved.chunks) == 1:
                return part
            if whole is None:
                whole = torch.empty(saved.size, dtype=part.dtype)
            whole[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))] = part
        assert whole is not None, "a tensor without parts"
        return whole

    def _read_chunk(self, index: MetadataIndex) -> Tensor:
        place = self._metadata.storage_data[index]
        with (self._folder / place.relative_path).open("rb") as file:
            part = _create_file_view(file, place.offset, place.length)
            tensor: Tensor = torch.load(part, map_location="cpu", weights_only=True)  # type: ignore[arg-type]
        return tensor

    def read_bytes(self, section: str, name: str) -> Tensor:
        """A saved tensor of bytes, uint8."""
        tensor = torch.empty(self._saved[f"{section}.{name}"].size, dtype=torch.uint8)
        self.read_into(section, {name: tensor})
        return tensor

    @property
    def _saved(self) -> Mapping[str, TensorStorageMetadata]:
        return self._metadata.state_dict_metadata  # type: ignore[return-value]

    def _check_shapes(self, section: str, tensors: Mapping[str, Tensor]) -> None:
        problems = []
        for name, tensor in tensors.items():
            saved = self._saved.get(f"{section}.{name}")
            if saved is None:
                problems.append(f"{name} is not in it")
            elif saved.size != tensor.size():
                problems.append(f"{name} has shape {tuple(tensor.size())} here and {tuple(saved.size)} there")
        if problems:
            raise self.mismatch(section, problems)

    def mismatch(self, section: str, problems: Sequence[str], shown: int = 3) -> ConfigurationError:
        """The error that names the first few differences between the checkpoint and what is to be loaded."""
        more = f"; and {len(problems) - shown} more" if len(problems) > shown else ""
        first = "; ".join(problems[:shown])
        return ConfigurationError(f"the checkpoint {self._folder} is of another {section}: {first}{more}")


class _Reader(FileSystemReader):
    """DCP's reader with the metadata that was read safely."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._safe_metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._safe_metadata


class _Unpickler(pickle.Unpickler):
    """Loads the classes that describe tensors, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _ALLOWED.get(module, set()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into a checkpoint")


def _read_metadata(path: Path) -> Metadata:
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
    except (OSError, EOFError, ValueError, TypeError, AttributeError, pickle.UnpicklingError) as error:
        raise InvalidCheckpoint(f"{path.name} cannot be read: {error}") from error
    if not isinstance(metadata, Metadata):
        raise InvalidCheckpoint(f"{path.name} does not describe a checkpoint")
    foreign = [
        name
        for name, saved in metadata.state_dict_metadata.items()
        if not isinstance(saved, TensorStorageMetadata)
    ]
    if foreign:  # DCP would unpickle them
        raise InvalidCheckpoint(f"{path.name} lists objects that are not tensors: {', '.join(foreign[:3])}")
    for place in metadata.storage_data.values():
        if Path(place.relative_path).name != place.relative_path:
            raise InvalidCheckpoint(f"{path.name} leads out of the checkpoint: {place.relative_path}")
    return metadata
