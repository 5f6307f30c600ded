"""The arithmetic of attention with grouped queries whose heads are normalised: shapes, work, what is kept. No torch.

See `models.layers.attention.Attention`; shared by the Qwen3 families.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from models.activations import FP32, Kernels, Saved, norm_saved


@dataclass(frozen=True)
class GroupedAttention:
    """H query heads and KV heads of keys and values, of `head_dim` features each, over a hidden state of `dim`."""

    dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int

    @property
    def q_dim(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.n_kv_heads * self.head_dim

    def shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter, by its full name; `name` is that of the attention."""
        return {
            f"{name}.wq.weight": (self.q_dim, self.dim),
            f"{name}.wk.weight": (self.kv_dim, self.dim),
            f"{name}.wv.weight": (self.kv_dim, self.dim),
            f"{name}.wo.weight": (self.dim, self.q_dim),
            f"{name}.q_norm.weight": (self.head_dim,),
            f"{name}.k_norm.weight": (self.head_dim,),
        }

    def flops(self, seq_len: int) -> int:
        """Forward and backward of a token: six per weight, and 12 · H · head_dim · seq_len for both products."""
        weights = self.dim * 2 * (self.q_dim + self.kv_dim)
        return 6 * weights + 12 * self.q_dim * seq_len

    def saved(self, element: int, kernels: Kernels) -> Saved:
        """What it keeps for each token, its input left out.

        In numbers: queries and keys as their norms keep them, q, k, v (turned), the output of attention, which wo
        keeps too, and H fp32 sums of the softmax.
        """
        q, k = self.q_dim, self.kv_dim
        norm = norm_saved(self.head_dim, "rmsnorm", element, kernels)
        heads = self.n_heads + self.n_kv_heads
        return Saved(
            inside=element * (2 * q + 2 * k) + FP32 * self.n_heads + heads * (norm.input + norm.more),
            deferred=element * (2 * self.dim + 2 * q + 2 * k),
            forward_temporary=FP32 * 2 * q,  # q in fp32 while it is turned
            per_sequence=FP32 * self.head_dim,  # complex numbers for half of the features
        )

    def problems(self) -> Iterator[str]:
        """Why no model can have it."""
        if self.head_dim >= 1 and self.head_dim % 2 != 0:
            yield f"head_dim {self.head_dim} is odd: rotary positions turn pairs"
        if self.n_kv_heads >= 1 and self.n_heads % self.n_kv_heads != 0:
            yield f"n_heads {self.n_heads} is not divisible by n_kv_heads {self.n_kv_heads}"
