"""A checkpoint becomes a Hugging Face folder: safetensors files with their index, `config.json`, tokenizer."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.hf import UnsupportedConfig, Weight
from models.registry import configured_sizes, family
from trainer.checkpoint.digest import Crc32, HashingFile
from trainer.checkpoint.manifest import MANIFEST_NAME, InvalidCheckpoint, checksum
from trainer.checkpoint.storage import CheckpointReader
from trainer.checkpoint.weights import TrainedModel
from trainer.errors import ConfigurationError, StagelineError
from trainer.weights.change import to_theirs
from trainer.weights.checkpoint_writer import Progress
from trainer.weights.folder import CONFIG_NAME, INDEX_NAME, SINGLE_NAME, open_folder
from trainer.weights.naming import hugging_face_format
from trainer.weights.safetensors_format import Planned, header
from trainer.weights.source import HuggingFaceSource
from trainer.weights.staging import Finished, Staging
from trainer.weights.tensor_file import DTYPE_NAMES, data_of
from trainer.weights.tokenizer_export import export_tokenizer

logger = logging.getLogger(__name__)

SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Piece:
    """One of their tensors: which of ours it is made from, and which of the tensors that ours becomes it is."""

    weight: Weight
    index: int
    dtype: torch.dtype

    @property
    def planned(self) -> Planned:
        return Planned(self.weight.theirs[self.index], DTYPE_NAMES[self.dtype], self.weight.their_shape())


@dataclass(frozen=True)
class Export:
    """What is exported: the checkpoint, and every tensor of theirs in the order in which it is written."""

    trained: TrainedModel
    reader: CheckpointReader
    config: Mapping[str, Any]
    pieces: Sequence[Piece]

    @property
    def size(self) -> int:
        """Bytes of the tensors."""
        return sum(piece.planned.size for piece in self.pieces)


def plan_export(trained: TrainedModel, dtype: torch.dtype | None) -> Export:
    """Find every tensor in the checkpoint; `dtype`: number format of the export, None: that of the checkpoint.

    Raises:
        ConfigurationError: the checkpoint is not sound, of another model than its configuration says, or of one that
            Hugging Face's format cannot express.
    """
    chosen = trained.config.model
    form = hugging_face_format(family(chosen.name))
    if form is None:
        raise ConfigurationError(
            f"model.name = {chosen.name!r}: the family has no module hf, so no names to export"
        )
    sizes = configured_sizes(chosen.name, chosen.flavor, chosen.norm_type, chosen.override)
    try:
        config = form.config_of(sizes)
        reader = CheckpointReader(trained.step_folder)
    except (UnsupportedConfig, InvalidCheckpoint) as error:
        raise ConfigurationError(f"{trained.step_folder}: {error}") from error
    weights = form.weights_of(sizes)
    _check(reader, weights)
    pieces = []
    for weight in weights:
        saved = reader.dtype("model", weight.name)
        wanted = saved if dtype is None or weight.full_precision else dtype
        pieces += [Piece(weight, index, wanted) for index in range(len(weight.theirs))]
    dtypes = {str(piece.dtype).removeprefix("torch.") for piece in pieces if not piece.weight.full_precision}
    if len(dtypes) == 1:
        config["torch_dtype"] = dtypes.pop()
    return Export(trained, reader, config, pieces)


def write_folder(
    export: Export,
    target: Path,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = lambda size: None,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Write the folder at `target`, streaming; an interrupted call is gone on with by the next.

    Memory: one tensor of ours (and its largest saved part, if it was saved in parts).

    Raises:
        ConfigurationError: there is something at `target` already.
        StagelineError: it cannot be written.
    """
    step = export.trained.step_folder
    origin = {
        "manifest": checksum(step, MANIFEST_NAME),
        "tensors": [[p.planned.name, p.planned.dtype] for p in export.pieces],
        "shard_bytes": shard_bytes,
    }
    try:
        staging = Staging(target, origin, Crc32)
        shards = shards_of(export.pieces, shard_bytes)
        names = _names(len(shards))
        for name, shard in zip(names, shards, strict=True):
            if staging.finished(name) is None:
                staging.finish(_write_shard(staging.path / name, shard, export.reader, progress))
            else:
                progress(sum(piece.planned.size for piece in shard))
        if len(shards) > 1:
            _write_json(staging.path / INDEX_NAME, _index(names, shards, export.size))
        tokens = export_tokenizer(export.trained, staging.path, say)
        _write_json(staging.path / CONFIG_NAME, {**export.config, **tokens})
        say("verifying what was written")
        _verify(staging.path, export)
        staging.publish()
    except OSError as error:
        raise StagelineError(f"{target}: cannot be written: {error.strerror}: {error.filename}") from error


def export_trained(trained: TrainedModel, target: Path, dtype: str) -> None:
    """Write the weights as `dtype`, e.g. "bfloat16", at `target`, which is left as it is if it is there already."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        write_folder(plan_export(trained, getattr(torch, dtype)), target, say=logger.info)


def shards_of(pieces: Sequence[Piece], shard_bytes: int) -> list[list[Piece]]:
    """The pieces of each file, of at most `shard_bytes` where a piece is not larger alone."""
    shards: list[list[Piece]] = [[]]
    held = 0
    for piece in pieces:
        if held and held + piece.planned.size > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(piece)
        held += piece.planned.size
    # Wider number formats first: so the data of each tensor begin where its format wants it.
    return [sorted(shard, key=lambda piece: -piece.dtype.itemsize) for shard in shards]


def _write_shard(
    path: Path, shard: Sequence[Piece], reader: CheckpointReader, progress: Progress
) -> Finished:
    with path.open("wb") as stream, HashingFile(stream, Crc32()) as file:
        file.write(header([piece.planned for piece in shard]))
        parts: list[Tensor] = []
        made_of: Weight | None = None
        for piece in shard:
            if piece.weight is not made_of:
                parts = []  # before the next is read: two tensors at once would be one too many
                parts = to_theirs(piece.weight, reader.read("model", piece.weight.name))
                made_of = piece.weight
            _write_piece(file, parts[piece.index], piece.dtype)
            progress(piece.planned.size)
        return Finished(path.name, file.size, file.finish())


def _write_piece(file: HashingFile, tensor: Tensor, dtype: torch.dtype, rows_bytes: int = 2**26) -> None:
    """Write a tensor, some rows at a time: a converted copy of all of it would double the memory."""
    rows = max(1, rows_bytes * tensor.shape[0] // max(1, tensor.nbytes))
    for some in tensor.split(rows):
        file.write(data_of(some.to(dtype)))


def _names(shards: int) -> list[str]:
    if shards == 1:
        return [SINGLE_NAME]
    return [f"model-{number:05}-of-{shards:05}.safetensors" for number in range(1, shards + 1)]


def _index(names: Sequence[str], shards: Sequence[Sequence[Piece]], size: int) -> dict[str, Any]:
    placed = {p.planned.name: name for name, shard in zip(names, shards, strict=True) for p in shard}
    return {"metadata": {"total_size": size}, "weight_map": dict(sorted(placed.items()))}


def _check(reader: CheckpointReader, weights: Sequence[Weight]) -> None:
    """The checkpoint's tensors are those of the model."""
    expected = {weight.name: weight.shape for weight in weights}
    names = reader.names("model")
    problems = [f"{name} is not in it" for name in expected if name not in names]
    problems += [f"{name} is in it, not in the model" for name in sorted(names - set(expected))]
    problems += [
        f"{name} has shape {reader.shape('model', name)} there and {shape} in the configuration"
        for name, shape in expected.items()
        if name in names and reader.shape("model", name) != shape
    ]
    if problems:
        raise reader.mismatch("model", problems)


def _verify(folder: Path, export: Export) -> None:
    """What was written opens as such a folder and holds every tensor with its shape, and no other."""
    opened = open_folder(folder)
    HuggingFaceSource(opened, list({piece.weight.name: piece.weight for piece in export.pieces}.values()))
    written = {name: located.entry.dtype for name, located in opened.tensors.items()}
    if written != {piece.planned.name: piece.planned.dtype for piece in export.pieces}:
        raise StagelineError(f"{folder} does not hold the tensors that were written")


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as stream:
        json.dump(value, stream, indent=2)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
