"""Softmax attention under a mask: the one place where queries meet keys.

Layers make queries, keys and values and hand them over; which tokens see each other, and which kernel computes it,
is decided here. Context parallelism exchanges the forward of this module for one that spans ranks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.sequences import Sequences


class Attend(nn.Module):
    """softmax(q kᵀ · scale) v, causal, each key and value head shared by H / KV query heads.

    Args:
        scale: of the products; None: 1 / sqrt(D).
        window: how many tokens each token sees, itself included (a sliding window); None: all before it.
    """

    def __init__(self, scale: float | None = None, window: int | None = None) -> None:
        super().__init__()
        self.scale = scale
        self.window = window

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> Tensor:
        """Attend from each token to itself and those before it.

        Args:
            q: (B, H, T, D). The queries of the last T tokens of the keys: with a key-value cache there are more
                keys than queries.
            k: (B, KV, S, D).
            v: (B, KV, S, E).
            sequences: of the queries; without a cache, of the keys too.

        Returns:
            (B, H, T, E).
        """
        mask = self._mask(q.shape[2], k.shape[2], sequences, q.device)
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None and q.shape[2] > 1,
            scale=self.scale,
            enable_gqa=grouped,
        )

    def _mask(self, queries: int, keys: int, sequences: Sequences, device: torch.device) -> Tensor | None:
        """True where a query sees a key, (T, S) or (B, 1, T, S); None where causal order alone says it all."""
        one_query_sees_all = queries == 1 and self.window is None
        if sequences.documents is None and self.window is None and (queries == keys or one_query_sees_all):
            return None
        place = torch.arange(keys, device=device)
        distance = place[keys - queries :, None] - place
        mask = distance >= 0
        if self.window is not None:
            mask = mask & (distance < self.window)
        if sequences.documents is not None:
            assert queries == keys, "documents are not masked in generation"
            same = sequences.documents[:, :, None] == sequences.documents[:, None, :]
            mask = (mask & same)[:, None]
        return mask
