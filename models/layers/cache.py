"""Keys and values of the tokens seen so far, so that generation computes each token once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


class CacheFull(ValueError):
    """More tokens than the cache was made for."""


@dataclass
class LayerCache:
    """Keys and values of one layer: room for `capacity` tokens, of which `length` are there."""

    keys: Tensor  # (B, KV, capacity, D)
    values: Tensor
    length: int = 0

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add T tokens, (B, KV, T, D) each, and return all so far. Raises CacheFull."""
        end = self.length + keys.shape[2]
        if end > self.keys.shape[2]:
            raise CacheFull(f"{end} tokens in a key-value cache made for {self.keys.shape[2]}")
        self.keys[:, :, self.length : end] = keys
        self.values[:, :, self.length : end] = values
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


class KeyValueCache:
    """The caches of all layers, by the layer's name. Made by the caller, filled by the model's forward."""

    def __init__(
        self,
        layers: tuple[str, ...],
        batch: int,
        capacity: int,
        n_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        value_dim: int | None = None,
    ) -> None:
        """Empty caches. `value_dim`: features of a value, where they are not as many as those of a key."""

        def room(features: int) -> Tensor:
            return torch.empty((batch, n_kv_heads, capacity, features), dtype=dtype, device=device)

        self.layers = {
            name: LayerCache(room(head_dim), room(head_dim if value_dim is None else value_dim))
            for name in layers
        }

    @property
    def length(self) -> int:
        """Tokens that every layer has seen."""
        return min((cache.length for cache in self.layers.values()), default=0)
