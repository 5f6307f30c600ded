"""Llama as Meta itself published it: `params.json`, and `consolidated.NN.pth`, each with a part of every matrix.

The names are ours, and so is the order of rows (pairs of neighbouring features turn together). A matrix is divided
among the files along the dimension along which tensor parallelism divides it; norms are in every file.

The files are pickles. They are loaded by torch's unpickler for weights, which makes tensors and nothing else, and are
mapped into memory instead of read.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.hf import shapes_of
from models.llama.sizes import LlamaSizes
from models.registry import family, names
from models.sizes import RopeScaling, SizesError
from trainer.errors import ConfigurationError
from trainer.weights.source import Form

PARAMS_NAME = "params.json"

# The dimension along which the files divide a matrix, by the last part of its module's name.
_DIVIDED = {"wq": 0, "wk": 0, "wv": 0, "wo": 1, "w1": 0, "w2": 1, "w3": 0, "output": 0}
_ROTATIONS = "rope.freqs"  # follow from the sizes
_MAPPED_BYTES = 256 * 2**20


@dataclass(frozen=True)
class MetaModel:
    """A folder of Meta's, opened; no tensor has been read."""

    path: Path
    sizes: LlamaSizes
    source: MetaSource


def open_meta(path: Path) -> MetaModel:
    """Open a folder. Raises ConfigurationError for files that are missing, broken, or do not fit each other."""
    try:
        params = json.loads((path / PARAMS_NAME).read_text(encoding="utf-8"))
        files = _Files(_numbered(path))
        sizes = _sizes(params, files)
    except FileNotFoundError as error:
        raise ConfigurationError(f"{path} holds no {PARAMS_NAME}, so it is no folder of Meta's") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, SizesError):
            raise ConfigurationError(f"{path}: {error}") from error
        raise ConfigurationError(f"{path / PARAMS_NAME} cannot be understood: {error!r}") from error
    return MetaModel(path, sizes, MetaSource(path, files, shapes_of(sizes)))


class MetaSource:
    """The weights of a model in such a folder."""

    def __init__(self, path: Path, files: _Files, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises ConfigurationError if a tensor is missing or left over, or has another shape."""
        self._files = files
        self._forms: dict[str, Form] = {}
        problems = [f"{name} is not in it" for name in shapes if name not in files.forms]
        known = {*shapes, "output.weight"}  # a tied output may be there: it was found to be the embedding
        problems += [
            f"{name} is in it, not in the model"
            for name in files.forms
            if name not in known and not name.endswith(_ROTATIONS)
        ]
        for name, shape in shapes.items():
            if name in files.forms:
                form = files.whole(name)
                self._forms[name] = form
                if form.shape != shape:
                    problems.append(f"{name} has shape {form.shape} there, {shape} is needed")
        if problems:
            raise ConfigurationError(f"{path} is of another model: {'; '.join(problems[:3])}")

    @property
    def forms(self) -> Mapping[str, Form]:
        return self._forms

    def read(self, name: str, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        return self._files.read(name, offsets, lengths)


class _Files:
    """The files of a model, mapped into memory, and unmapped again when much of them has been read."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._mapped: list[dict[str, Tensor]] | None = None
        self._read = 0
        parts = self._parts()
        self.forms = {name: Form(tuple(tensor.shape), tensor.dtype) for name, tensor in parts[0].items()}
        for path, part in zip(paths, parts, strict=True):
            if {name: Form(tuple(tensor.shape), tensor.dtype) for name, tensor in part.items()} != self.forms:
                raise ConfigurationError(f"{path} holds other tensors, or other shapes, than {paths[0].name}")

    @property
    def count(self) -> int:
        return len(self._paths)

    def whole(self, name: str) -> Form:
        """Form of a tensor that the files hold together."""
        form, dimension = self.forms[name], self._dimension(name)
        if dimension is None:
            return form
        shape = list(form.shape)
        shape[dimension] *= self.count
        return Form(tuple(shape), form.dtype)

    def read(self, name: str, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """A part of such a tensor, in memory of its own."""
        dimension = self._dimension(name)
        region = [slice(o, o + n) for o, n in zip(offsets, lengths, strict=True)]
        parts = self._parts()
        if dimension is None:
            pieces = [parts[0][name][tuple(region)]]
        else:
            size = self.forms[name].shape[dimension]
            first, last = offsets[dimension], offsets[dimension] + lengths[dimension]
            pieces = []
            for number in range(first // size, -(-last // size)):
                begin = number * size
                region[dimension] = slice(max(first - begin, 0), min(last - begin, size))
                pieces.append(parts[number][name][tuple(region)])
        tensor = torch.cat(pieces, dim=dimension or 0)
        self._read += tensor.nbytes
        return tensor

    def _dimension(self, name: str) -> int | None:
        """Along which dimension the files divide a tensor; None: each has all of it."""
        module = name.removesuffix(".weight").rpartition(".")[2]
        if self.count == 1:
            return None
        if module == "tok_embeddings":  # Llama 2 divides the features, Llama 3 the vocabulary, as the output
            same_rows = self.forms[name].shape[0] == self.forms["output.weight"].shape[0]
            return 0 if same_rows else 1
        return _DIVIDED.get(module)

    def _parts(self) -> list[dict[str, Tensor]]:
        if self._mapped is None or self._read > _MAPPED_BYTES:
            self._mapped, self._read = None, 0  # unmapped first: pages that were read count as memory of ours
            self._mapped = [_load(path) for path in self._paths]
        return self._mapped


def _load(path: Path) -> dict[str, Tensor]:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigurationError(f"{path} cannot be read as tensors alone: {reason}") from error
    if not isinstance(loaded, dict) or not all(isinstance(tensor, Tensor) for tensor in loaded.values()):
        raise ConfigurationError(f"{path} holds other things than tensors by name")
    return loaded


def _numbered(path: Path) -> list[Path]:
    found = sorted(path.glob("consolidated.*.pth"))
    expected = [path / f"consolidated.{number:02}.pth" for number in range(len(found))]
    if not found or found != expected:
        names = ", ".join(each.name for each in found) or "none"
        raise ConfigurationError(
            f"{path}: expected consolidated.00.pth and so on without gaps, found {names}"
        )
    return found


def _sizes(params: Mapping[str, Any], files: _Files) -> LlamaSizes:
    """The sizes that parameters and shapes say, and for the rest those of the published model that they fit."""
    vocab_size, ffn_hidden = (
        files.whole("tok_embeddings.weight").shape[0],
        files.whole("layers.0.feed_forward.w1.weight"),
    )
    scaled = bool(params.get("use_scaled_rope"))
    sizes = LlamaSizes(
        dim=params["dim"],
        n_layers=params["n_layers"],
        n_heads=params["n_heads"],
        n_kv_heads=params.get("n_kv_heads") or params["n_heads"],
        ffn_hidden=ffn_hidden.shape[0],
        vocab_size=vocab_size,
        max_seq_len=131_072 if scaled else 4096,
        norm_eps=params["norm_eps"],
        rope_theta=float(params.get("rope_theta") or 10_000.0),
        rope_scaling=RopeScaling() if scaled else None,
    )
    published = _published(sizes)
    if published is None:
        return replace(sizes, tie_embeddings="output.weight" not in files.forms)
    tied = published.tie_embeddings and _output_is_embedding(files)
    return replace(published, norm_eps=sizes.norm_eps, tie_embeddings=tied)


def _published(sizes: LlamaSizes) -> LlamaSizes | None:
    """The published model with these dimensions: what no file says, such as the scaling's factor, is known of it."""

    def key(each: LlamaSizes) -> tuple[object, ...]:
        widths = (each.dim, each.n_layers, each.n_heads, each.n_kv_heads, each.ffn_hidden, each.vocab_size)
        return (*widths, each.rope_theta, each.rope_scaling is not None)

    known = (each for name in names() for each in family(name).sizes.values() if isinstance(each, LlamaSizes))
    return next((each for each in known if key(each) == key(sizes)), None)


def _output_is_embedding(files: _Files, rows: int = 4096) -> bool:
    if "output.weight" not in files.forms:
        return True
    shape = files.whole("output.weight").shape
    for begin in range(0, shape[0], rows):
        region = (begin, 0), (min(rows, shape[0] - begin), shape[1])
        if not torch.equal(
            files.read("output.weight", *region), files.read("tok_embeddings.weight", *region)
        ):
            return False
    return True
