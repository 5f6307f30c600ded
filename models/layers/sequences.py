"""What the layers need to know of a microbatch's sequences beside their hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """Where the tokens of a microbatch stand.

    Attributes:
        positions: (T,) or (B, T), integers: the place of each token in its sequence, for rotary positions.
        documents: (B, T), integers that do not fall along a sequence: the document that each token belongs to.
            Tokens of different documents do not see each other. None: a sequence is one document.
        masks: what the kernels of attention are told, by the width of their window, made once for all layers; None:
            each layer makes its own. See `models.layers.attend`.
    """

    positions: Tensor
    documents: Tensor | None = None
    masks: Mapping[int | None, Any] | None = None

    @classmethod
    def in_order(cls, length: int, device: torch.device, *, past: int = 0) -> Sequences:
        """Tokens one after the other, beginning with position `past`."""
        return cls(torch.arange(past, past + length, device=device))

    @classmethod
    def packed(cls, documents: Tensor) -> Sequences:
        """Sequences of several documents each, (B, T): positions begin again at 0 where a document begins."""
        place = torch.arange(documents.shape[1], device=documents.device)
        begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0))
        return cls(place - (place * begins).cummax(dim=1).values, documents)
