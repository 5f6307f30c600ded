"""Writing and reading the files of one checkpoint with torch.distributed.checkpoint.

Reading runs nothing that the files contain: tensors are loaded weights-only, after `.metadata` (see `metadata.py`)
and what it says about the files has been checked. Every rank reads what it needs by itself, without a collective and
without a process group, so one that fails leaves nobody waiting.
"""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, WriteResult
from torch.futures import Future

from trainer.checkpoint.agreement import FailedOnSomeRank, describe
from trainer.checkpoint.filesystem import Folder, as_folder
from trainer.checkpoint.manifest import FileEntry, InvalidCheckpoint
from trainer.checkpoint.metadata import METADATA_NAME, read_metadata
from trainer.checkpoint.state import StateDict
from trainer.errors import ConfigurationError


def write_tensors(
    folder: Path | Folder, tensors: StateDict, group: dist.ProcessGroup | None
) -> tuple[FileEntry, ...]:
    """Write the tensors of all ranks into an existing, empty folder, synchronised to disk; this rank's files.

    Collective over `group` if there is one. Raises FailedOnSomeRank on all ranks if one of them cannot write.
    """
    writer = _Writer(as_folder(folder))
    with warnings.catch_warnings():
        # Without a process group the warning says that one process saves: as intended.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            save(tensors, storage_writer=writer, process_group=group, no_dist=group is None)
        except CheckpointException as error:
            # DCP has told all ranks. Its own text is the traceback of every rank that failed.
            rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
            raise FailedOnSomeRank(f"rank {rank}: {describe(cause)}") from error
    return tuple(writer.files.written)


class CheckpointReader:
    """The tensors of one checkpoint, whose files have been verified before."""

    def __init__(self, folder: Path | Folder, metadata: Metadata | None = None) -> None:
        """`metadata`: the description of its tensors, if it has been read already.

        Raises InvalidCheckpoint if it cannot be read or is not harmless.
        """
        self._folder = as_folder(folder)
        self._metadata = read_metadata(self._folder) if metadata is None else metadata

    def names(self, section: str) -> set[str]:
        """Names of the saved tensors of a section, e.g. "model"."""
        prefix = f"{section}."
        return {name.removeprefix(prefix) for name in self._saved if name.startswith(prefix)}

    def read_into(self, section: str, tensors: Mapping[str, Tensor]) -> None:
        """Fill tensors (plain ones, or DTensors of any layout) in place; types are converted as copying does.

        Raises:
            ConfigurationError: a tensor is not in the checkpoint, or has another shape there.
            InvalidCheckpoint: a file is damaged.
        """
        self._check_shapes(section, tensors)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            try:
                load({section: dict(tensors)}, storage_reader=_Reader(self._metadata, self), no_dist=True)
            except CheckpointException as error:  # no Exception, so nobody would catch it
                raise next(iter(error.failures.values()))[0] from error

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
            part = self.read_part(MetadataIndex(full_name, chunk.offsets))
            if len(saved.chunks) == 1:
                return part
            if whole is None:
                whole = torch.empty(saved.size, dtype=part.dtype)
            whole[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))] = part
        assert whole is not None, "a tensor without parts"
        return whole

    def read_part(self, index: MetadataIndex) -> Tensor:
        """A part of a tensor as it was saved. Raises InvalidCheckpoint if it is not what the metadata says."""
        place = self._metadata.storage_data[index]
        where = f"{place.relative_path}, from byte {place.offset}"
        try:
            with self._folder.open_part(place.relative_path, place.offset, place.length) as file:
                _refuse_compressed(file, place.length)
                part = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # of damaged bytes anything can come
            raise InvalidCheckpoint(f"{where}: cannot be read: {describe(error)[:300]}") from error
        saved = self._saved[index.fqn]
        shapes = [chunk.sizes for chunk in saved.chunks if chunk.offsets == index.offset]
        if not isinstance(part, Tensor) or [part.size()] != shapes or part.dtype != saved.properties.dtype:
            raise InvalidCheckpoint(f"{where}: is not what {METADATA_NAME} says of {index.fqn}")
        return part

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


def _refuse_compressed(file: BinaryIO, length: int) -> None:
    """A few bytes that unpack to very many would fill the memory. torch saves tensors as they are."""
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    if (
        any(e.compress_type != zipfile.ZIP_STORED for e in entries)
        or sum(e.file_size for e in entries) > length
    ):
        raise InvalidCheckpoint("compressed")
    file.seek(0)


class _Reader(StorageReader):
    """What DCP needs to read: it works out which part of which saved part goes where."""

    def __init__(self, metadata: Metadata, reader: CheckpointReader) -> None:
        self._metadata = metadata
        self._reader = reader

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            saved = self._reader.read_part(item.storage_index)
            part = narrow_tensor_by_index(saved, item.storage_offsets, item.lengths)
            target = planner.resolve_tensor(item).detach()
            target.copy_(part)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_reader(self, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class _Files(FileSystem):
    """DCP's file system: the files of a folder, whose checksums are computed while they are written."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self.written: list[FileEntry] = []

    def concat_path(self, path: Any, suffix: str) -> Any:
        return suffix

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with self._folder.create(path) as file:
            yield file
        self.written.append(FileEntry(path, file.size, file.hexdigest()))


class _Writer(FileSystemWriter):
    """DCP's writer into a folder that has been made for it."""

    def __init__(self, folder: Folder) -> None:
        # Copying ahead would take memory on device 0 whatever the rank's device; what is saved later is on the host.
        super().__init__("", single_file_per_rank=True, sync_files=False, per_thread_copy_ahead=0)
        self.fs = self.files = _Files(folder)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {result.index: result.storage_data for rank in results for result in rank}
        with self.files.create_stream(METADATA_NAME, "wb") as file:
            pickle.dump(metadata, file)
