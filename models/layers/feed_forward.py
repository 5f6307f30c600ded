"""The feed-forward layer of Llama: SwiGLU."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class FeedForward(nn.Module):
    """w2(silu(w1 x) · w3 x) (Shazeer 2020, GLU Variants Improve Transformer, arXiv 2002.05202)."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))
