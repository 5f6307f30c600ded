"""Softmax attention under a mask: the one place where queries meet keys.

Layers make queries, keys and values and hand them over; which tokens see each other, and which kernel computes it,
is decided here. Context parallelism exchanges the forward and the mask of this module for those that span ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from models.layers.attention_kernels import Flash, Flex, Kernel, Mask, Sdpa, Sight
from models.layers.sequences import Sequences

KernelName = Literal["auto", "sdpa", "flash", "flex"]


class Attend(nn.Module):
    """softmax(q kᵀ · scale) v, causal, each key and value head shared by H / KV query heads.

    Args:
        scale: of the products; None: 1 / sqrt(D).
        window: how many tokens each token sees, itself included (a sliding window); None: all before it.

    Attributes:
        kernel: what computes it, see `use_attention_kernel`.
    """

    def __init__(self, scale: float | None = None, window: int | None = None) -> None:
        super().__init__()
        self.scale = scale
        self.window = window
        self.kernel: Kernel = Sdpa()

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
        if sequences.masks is not None:
            mask = sequences.masks[self.window]
        else:
            mask = self.mask(sequences, q.shape[0], q.shape[2], k.shape[2], q.dtype)
        return self.kernel.attend(q, k, v, mask, self.scale)

    def mask(self, sequences: Sequences, rows: int, queries: int, keys: int, dtype: torch.dtype) -> Mask:
        """What the kernel must be told beside causal order: the same for all layers with the same window."""
        assert sequences.documents is None or queries == keys, "documents are not masked in generation"
        device = sequences.positions.device
        return self.kernel.mask(Sight(rows, queries, keys, self.window, sequences.documents, dtype, device))


def with_masks(sequences: Sequences, attends: Iterable[Attend], rows: int, dtype: torch.dtype) -> Sequences:
    """The sequences with the masks of all of these, so that layers need not make them one by one.

    Args:
        sequences: of the queries and of the keys.
        attends: of the layers that will be told of them.
        rows: sequences of the microbatch.
        dtype: of queries and keys.
    """
    length = sequences.positions.shape[-1]
    by_window = {attend.window: attend for attend in attends}
    masks = {w: attend.mask(sequences, rows, length, length, dtype) for w, attend in by_window.items()}
    return replace(sequences, masks=masks)


def use_attention_kernel(
    module: nn.Module, name: KernelName, device: torch.device, *, documents_are_masked: bool
) -> None:
    """Choose the kernel of every attention layer in `module`.

    "auto" is what is fastest where there is more to say than causal order: flex attention on accelerators, which leaves
    out what is not seen. Elsewhere torch chooses.
    """
    named: dict[str, Kernel] = {"sdpa": Sdpa(), "flash": Flash(), "flex": Flex()}
    for attend in module.modules():
        if isinstance(attend, Attend):
            masked = documents_are_masked or attend.window is not None
            best = "flex" if masked and device.type == "cuda" else "sdpa"
            attend.kernel = named[best if name == "auto" else name]
