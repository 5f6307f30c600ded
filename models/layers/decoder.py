"""The decoder-only transformer around its layers: embedding, layers, norm, output.

What all families have in common. A family's own file says what a layer is. Shapes: B sequences, T tokens, D
features, V vocabulary.

The model knows nothing of parallelism. It can be built with a part of its modules only, which makes it a stage of a
pipeline: parameters keep the names they have in the whole model. Rotations are computed once per forward from the
positions.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from models.decoder_sizes import NormType
from models.initialize import Normal, Ones, Rule, Stacked, Zeros
from models.layers.attend import Attend, with_masks
from models.layers.cache import KeyValueCache
from models.layers.norm import build_norm
from models.layers.rope import rotations
from models.layers.sequences import Sequences
from models.layers.tied import TiedOutput
from models.sizes import RopeScaling, Sizes, YarnScaling
from models.tied import copied_names


class RotarySizes(Sizes, Protocol):
    """Sizes of a decoder with heads of one width and rotary positions over all of it."""

    @property
    def norm_type(self) -> NormType: ...

    @property
    def norm_eps(self) -> float: ...

    @property
    def n_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def rope_theta(self) -> float: ...

    @property
    def rope_scaling(self) -> RopeScaling | YarnScaling | None: ...


class Decoder(nn.Module, ABC):
    """The modules of a model that are named, all of them by default.

    Args:
        sizes: the sizes of the whole model.
        modules: names out of `sizes.modules()`, in the model's order and without gaps.

    Raises:
        ValueError: the modules are not a contiguous part of the model.

    Attributes:
        copied: full names of the parameters that another part of the model holds as well: the embedding's, where the
            output is tied to it and the embedding is in another part.
    """

    residual_outputs: ClassVar[tuple[str, ...]] = ()
    """Names of the linear layers through which a layer adds to the residual stream; see `initial`."""

    def __init__(self, sizes: RotarySizes, modules: Sequence[str] | None = None) -> None:
        super().__init__()
        owned = sizes.modules() if modules is None else tuple(modules)
        _check_contiguous(owned, sizes)
        self.sizes = sizes
        self.copied = copied_names(sizes, owned)
        self._embeds = "tok_embeddings" in owned
        holds_matrix = self._embeds or bool(self.copied)
        self.tok_embeddings = nn.Embedding(sizes.vocab_size, sizes.dim) if holds_matrix else None
        indices = (name.removeprefix("layers.") for name in owned if name.startswith("layers."))
        self.layers = nn.ModuleDict({index: self.build_layer(int(index)) for index in indices})
        self._attends = tuple(module for module in self.layers.modules() if isinstance(module, Attend))
        self.norm = build_norm(sizes.norm_type, sizes.dim, sizes.norm_eps) if "norm" in owned else None
        self.output = self._build_output() if "output" in owned else None

    def _build_output(self) -> nn.Linear | TiedOutput:
        if not self.sizes.tie_embeddings:
            return nn.Linear(self.sizes.dim, self.sizes.vocab_size, bias=False)
        assert self.tok_embeddings is not None
        return TiedOutput(self.tok_embeddings)

    @abstractmethod
    def build_layer(self, index: int) -> nn.Module:
        """The layer of this index in the whole model: `layer(h, turns, sequences, cache)`, (B, T, D) to (B, T, D)."""

    def turns(self, positions: Tensor) -> Tensor:
        """The rotations of queries and keys at these positions, for all layers."""
        sizes = self.sizes
        return rotations(positions, sizes.head_dim, sizes.rope_theta, sizes.rope_scaling)

    def forward(
        self, x: Tensor, sequences: Sequences | None = None, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Run the modules that are there.

        Args:
            x: tokens (B, T), integers, if the embedding is among the modules, else hidden states (B, T, D).
            sequences: where the tokens stand; by default one after the other, after those in the cache.
            cache: for generation, see `new_cache`.

        Returns:
            Logits (B, T, V) if the output is among the modules, else hidden states (B, T, D).
        """
        if sequences is None:
            past = 0 if cache is None else cache.length
            sequences = Sequences.in_order(x.shape[1], x.device, past=past)
        h = self.tok_embeddings(x) if self._embeds and self.tok_embeddings is not None else x
        if self.layers:
            turns = self.turns(sequences.positions)
            if cache is None:
                sequences = with_masks(sequences, self._attends, h.shape[0], h.dtype)
            for name, layer in self.layers.items():
                h = layer(h, turns, sequences, None if cache is None else cache.layers[name])
        if self.norm is not None:
            h = self.norm(h)
        return h if self.output is None else self.output(h)

    def new_cache(
        self,
        batch: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> KeyValueCache:
        """An empty key-value cache for `batch` sequences of up to `capacity` tokens."""
        sizes = self.sizes
        return KeyValueCache(
            tuple(self.layers), batch, capacity, sizes.n_kv_heads, sizes.head_dim, dtype, device
        )

    def initial(self, name: str) -> Rule:
        """How the parameter or buffer of this full name starts; the scheme of torchtitan's Llama.

        Matrices are normal with standard deviation 0.02; those through which a layer adds to the residual stream
        are scaled down with depth, so that the stream's variance grows slowly. Hidden states reach the output with
        unit variance: its rows have norm 1, so that logits have unit variance too. That holds for the embedding
        also when the output is tied to it. Each expert is a matrix by itself. Buffers, which count tokens and weigh
        experts against each other, are 0.
        """
        *modules, own = name.split(".")
        layer = modules.pop() if own == "weight" else own
        if layer.endswith("norm"):
            return Ones()
        if layer in ("expert_bias", "tokens_per_expert"):
            return Zeros()
        if layer == "output" or (layer == "tok_embeddings" and self.sizes.tie_embeddings):
            return Normal(std=1 / math.sqrt(self.sizes.dim), cutoff=3.0)
        if layer == "tok_embeddings":
            return Normal(std=1.0)
        depth = int(modules[1]) if layer in self.residual_outputs else None
        matrix = Normal(0.02 if depth is None else 0.02 / math.sqrt(2 * (depth + 1)), cutoff=3.0)
        return Stacked(matrix) if modules[-1] == "experts" else matrix


def _check_contiguous(owned: tuple[str, ...], sizes: Sizes) -> None:
    every = sizes.modules()
    start = every.index(owned[0]) if owned and owned[0] in every else 0
    if not owned or owned != every[start : start + len(owned)]:
        raise ValueError(
            f"{', '.join(owned) or 'nothing'} is not a part of the model in order and without gaps"
        )
