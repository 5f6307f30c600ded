"""What the layers need to know of a microbatch's sequences beside their hidden states."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """Where the tokens of a microbatch stand.

    Attributes:
        positions: (T,) or (B, T), integers: the place of each token in its sequence, for rotary positions.
        documents: (B, T), integers that do not fall along a sequence: the document that each token belongs to.
            Tokens of different documents do not see each other. None: a sequence is one document.
    """

    positions: Tensor
    documents: Tensor | None = None

    @classmethod
    def in_order(cls, length: int, device: torch.device, *, past: int = 0) -> Sequences:
        """Tokens one after the other, beginning with position `past`."""
        return cls(torch.arange(past, past + length, device=device))
