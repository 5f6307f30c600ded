"""Writes the weights of a source as a checkpoint, block by block: what `torch.distributed.checkpoint` would have written.

A file of that format is one `torch.save` after the other, each with a block of a tensor; `.metadata` says which block
of which tensor begins at which byte of which file. Any rank of any layout can then read the part that it needs.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from trainer.checkpoint.digest import HashingFile, sha256
from trainer.checkpoint.manifest import FileEntry
from trainer.checkpoint.metadata import METADATA_NAME
from trainer.weights.source import Form, WeightSource
from trainer.weights.staging import Finished, Staging

BLOCK_BYTES = 64 * 2**20
FILE_BYTES = 2**30

Progress = Callable[[int], None]
"""Told how many bytes have been written since the last call."""


@dataclass(frozen=True)
class Block:
    """Some rows of a tensor: what is read and written at once."""

    name: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    size: int  # bytes


def blocks_of(forms: Mapping[str, Form], block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
    """All tensors in rows of together at most `block_bytes`, or one row each."""
    for name, form in forms.items():
        rows = form.shape[0]
        row_bytes = form.size // rows
        step = max(1, block_bytes // row_bytes)
        for first in range(0, rows, step):
            count = min(step, rows - first)
            rest = form.shape[1:]
            yield Block(name, (first, *(0 for _ in rest)), (count, *rest), count * row_bytes)


def files_of(blocks: Iterator[Block], file_bytes: int = FILE_BYTES) -> list[list[Block]]:
    """The blocks of each file, of about `file_bytes`."""
    files: list[list[Block]] = [[]]
    held = 0
    for block in blocks:
        if held and held + block.size > file_bytes:
            files.append([])
            held = 0
        files[-1].append(block)
        held += block.size
    return files


def write_weights(
    folder: Path,
    source: WeightSource,
    staging: Staging,
    progress: Progress = lambda size: None,
    file_bytes: int = FILE_BYTES,
) -> list[FileEntry]:
    """Write all tensors of a source into a folder of what is being staged; its files, the metadata among them.

    Files that an earlier start finished are kept. Memory: a block, whatever the size of the model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    blocks = files_of(blocks_of(source.forms), file_bytes)
    for number, of_file in enumerate(blocks):
        path = folder / f"__{number}_0.distcp"
        name = str(path.relative_to(staging.path))
        finished = staging.finished(name)
        if finished is None:
            finished = staging.finish(_write_file(path, name, of_file, source, progress))
        else:
            progress(sum(block.size for block in of_file))
        written.append(finished)
    _write_metadata(folder / METADATA_NAME, source.forms, blocks, written)
    return [
        FileEntry(str((staging.path / each.name).relative_to(folder)), each.size, each.checksum)
        for each in written
    ]


def _write_file(
    path: Path, name: str, blocks: Sequence[Block], source: WeightSource, progress: Progress
) -> Finished:
    """Write one file; its notes are begin and length of each block in it."""
    places = []
    with path.open("wb") as stream, HashingFile(stream, sha256()) as file:
        for block in blocks:
            tensor = source.read(block.name, block.offsets, block.lengths)
            if tensor.untyped_storage().nbytes() != tensor.nbytes:
                tensor = tensor.clone()  # else all of its storage would be saved
            begin = file.size
            torch.save(tensor, file)  # type: ignore[arg-type]  # of a file it needs `write` and `flush`
            places.append([begin, file.size - begin])
            progress(block.size)
        return Finished(name, file.size, file.finish(), places)


def _write_metadata(
    path: Path, forms: Mapping[str, Form], files: Sequence[Sequence[Block]], written: Sequence[Finished]
) -> None:
    chunks: dict[str, list[ChunkStorageMetadata]] = {name: [] for name in forms}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for blocks, finished in zip(files, written, strict=True):
        for block, (begin, length) in zip(blocks, finished.notes, strict=True):
            offsets, full_name = torch.Size(block.offsets), f"model.{block.name}"
            chunks[block.name].append(ChunkStorageMetadata(offsets, torch.Size(block.lengths)))
            place = _StorageInfo(Path(finished.name).name, begin, length)
            storage[MetadataIndex(full_name, offsets)] = place
    metadata = Metadata(
        state_dict_metadata={
            f"model.{name}": TensorStorageMetadata(
                TensorProperties(form.dtype), torch.Size(form.shape), chunks[name]
            )
            for name, form in forms.items()
        },
        planner_data={f"model.{name}": ("model", name) for name in forms},
        storage_data=storage,
        version=CURRENT_DCP_VERSION,
    )
    with path.open("wb") as stream:
        pickle.dump(metadata, stream)
        stream.flush()
        os.fsync(stream.fileno())
