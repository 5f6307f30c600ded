"""Weights of a model, wherever they lie, as our tensors: any part of any of them, read when it is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from models.hf import EMBEDDING, OUTPUT, Weight
from trainer.errors import ConfigurationError
from trainer.weights.change import read_ours
from trainer.weights.folder import HuggingFaceFolder, Located
from trainer.weights.quantized import QUANTIZED, SCALE_SUFFIX, blocks_of
from trainer.weights.tensor_file import DTYPES, read_region


@dataclass(frozen=True)
class Form:
    """Shape and number format of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class WeightSource(Protocol):
    """Every tensor of a model, by its full name here."""

    @property
    def forms(self) -> Mapping[str, Form]:
        """Of every tensor, in the model's order."""
        ...

    def read(self, name: str, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """A part of a tensor: `lengths[i]` elements from `offsets[i]` in each dimension."""
        ...


class HuggingFaceSource:
    """The weights of a model in a Hugging Face folder."""

    def __init__(
        self,
        folder: HuggingFaceFolder,
        weights: Sequence[Weight],
        is_left_out: Callable[[str], bool] = lambda name: False,
    ) -> None:
        """
        Args:
            folder: where the tensors lie.
            weights: those of our model.
            is_left_out: whether a tensor of theirs (by its name) has no counterpart in any model of ours.

        Raises:
            ConfigurationError: a tensor is missing or left over, or has another shape or no format of weights.
        """
        self._folder = folder
        self._blocks = blocks_of(folder.config, folder.path)
        self._weights = {weight.name: self._tied(weight) for weight in weights}
        used = {name for weight in self._weights.values() for name in weight.theirs}
        used |= {f"{name}{SCALE_SUFFIX}" for name in used if self._is_quantized(name)}
        left_over = [name for name in folder.tensors if name not in used and not is_left_out(name)]
        problems = [problem for weight in self._weights.values() for problem in self._problems(weight)]
        problems += [f"{name} is in it, not in the model" for name in left_over if not self._is_copy(name)]
        if problems:
            raise _of_another_model(folder.path, problems)
        self._forms = {weight.name: self._form(weight) for weight in self._weights.values()}

    @property
    def forms(self) -> Mapping[str, Form]:
        return self._forms

    def read(self, name: str, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        return read_ours(self._weights[name], self._read_theirs, offsets, lengths)

    def _read_theirs(self, name: str, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        located = self._folder.tensors[name]
        part = read_region(located.path, located.entry, offsets, lengths)
        if self._blocks is None or not self._is_quantized(name):
            return part
        scales = self._folder.tensors[f"{name}{SCALE_SUFFIX}"]
        factors = read_region(scales.path, scales.entry, *self._blocks.around(offsets, lengths))
        return self._blocks.multiply(part, factors, offsets)

    def _is_quantized(self, name: str) -> bool:
        located = self._folder.tensors.get(name)
        return located is not None and located.entry.dtype == QUANTIZED

    def _tied(self, weight: Weight) -> Weight:
        """Their embedding in place of an output that the files, whose model ties it, do not have."""
        tied = self._folder.config.get("tie_word_embeddings", False)
        if tied and weight.theirs == (OUTPUT,) and OUTPUT not in self._folder.tensors:
            return replace(weight, theirs=(EMBEDDING,))
        return weight

    def _is_copy(self, name: str) -> bool:
        """Whether a left-over output is a copy of the embedding that our model ties it to."""
        output, embedding = self._folder.tensors[name], self._folder.tensors.get(EMBEDDING)
        if name != OUTPUT or embedding is None or output.entry.shape != embedding.entry.shape:
            return False
        return all(torch.equal(*parts) for parts in zip(_blocks(output), _blocks(embedding), strict=True))

    def _problems(self, weight: Weight) -> Iterator[str]:
        for name in weight.theirs:
            located = self._folder.tensors.get(name)
            if located is None:
                yield f"{name} is not in it"
            elif located.entry.shape != weight.their_shape():
                yield f"{name} has shape {located.entry.shape} there, {weight.their_shape()} is needed"
            elif located.entry.dtype == QUANTIZED:
                yield from self._scale_problems(name, located.entry.shape)
            elif located.entry.dtype not in DTYPES:
                yield f"{name} holds {located.entry.dtype}, expected one of {', '.join(DTYPES)}"

    def _scale_problems(self, name: str, shape: tuple[int, ...]) -> Iterator[str]:
        scales = self._folder.tensors.get(f"{name}{SCALE_SUFFIX}")
        if self._blocks is None or len(shape) != 2:
            yield f"{name} holds {QUANTIZED}, but config.json has no quantization_config for it"
        elif scales is None or scales.entry.dtype != "F32" or scales.entry.shape != self._blocks.count(shape):
            yield f"{name} has no {name}{SCALE_SUFFIX} of {self._blocks.count(shape)} F32 beside it"

    def _form(self, weight: Weight) -> Form:
        dtypes = {
            torch.bfloat16 if self._is_quantized(name) else DTYPES[self._folder.tensors[name].entry.dtype]
            for name in weight.theirs
        }
        if len(dtypes) > 1:
            raise _of_another_model(self._folder.path, [f"the parts of {weight.name} differ in dtype"])
        return Form(weight.shape, dtypes.pop())


class SourceReader:
    """Fills a rank's tensors from a source: the same methods as a checkpoint's reader."""

    def __init__(self, source: WeightSource, path: Path) -> None:
        """`path`: where the source lies, for messages."""
        self._source = source
        self._path = path

    def names(self, section: str) -> set[str]:
        """Names of the tensors of a section, of which a source has but "model"."""
        return set(self._source.forms) if section == "model" else set()

    def read_into(self, section: str, tensors: Mapping[str, Tensor]) -> None:
        """Fill tensors in place (plain ones, or DTensors of any layout): a rank reads the part that it holds.

        Raises ConfigurationError if a tensor is not there or has another shape.
        """
        problems = []
        for name, tensor in tensors.items():
            form = self._source.forms.get(name)
            if form is None:
                problems.append(f"{name} is not in it")
            elif form.shape != tuple(tensor.shape):
                problems.append(f"{name} has shape {tuple(tensor.shape)} here and {form.shape} there")
        if problems:
            raise self.mismatch(section, problems)
        for name, tensor in tensors.items():
            self._fill(name, tensor.detach())

    def mismatch(self, section: str, problems: Sequence[str]) -> ConfigurationError:
        """The error that names the first few differences."""
        return _of_another_model(self._path, problems)

    def _fill(self, name: str, tensor: Tensor) -> None:
        lengths, offsets = tuple(tensor.shape), (0,) * tensor.ndim
        local = tensor
        if isinstance(tensor, DTensor):
            local = tensor.to_local()
            lengths, offsets = compute_local_shape_and_global_offset(
                tensor.shape, tensor.device_mesh, tensor.placements
            )
        if local.numel():
            local.copy_(self._source.read(name, offsets, lengths))


def _blocks(located: Located, rows: int = 4096) -> Iterator[Tensor]:
    shape = located.entry.shape
    for begin in range(0, shape[0], rows):
        count = min(rows, shape[0] - begin)
        yield read_region(located.path, located.entry, (begin, *(0 for _ in shape[1:])), (count, *shape[1:]))


def _of_another_model(path: Path, problems: Sequence[Any], shown: int = 3) -> ConfigurationError:
    more = f"; and {len(problems) - shown} more" if len(problems) > shown else ""
    return ConfigurationError(f"{path} is of another model: {'; '.join(map(str, problems[:shown]))}{more}")
