"""An output whose matrix is that of the embedding (Press and Wolf 2017, arXiv 1608.05859)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class TiedOutput(nn.Module):
    """Logits (..., V) = h (..., D) times the embedding's matrix (V, D) transposed; no parameter of its own."""

    bias: None = None

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        # Not registered: the matrix has one name, and one place in the model, those of the embedding.
        self.__dict__["_embedding"] = embedding

    @property
    def weight(self) -> Tensor:
        """(V, D). Looked up at each use: FSDP exchanges the parameter between sharded and gathered."""
        embedding: nn.Embedding = self.__dict__["_embedding"]
        return embedding.weight

    def forward(self, h: Tensor) -> Tensor:
        return F.linear(h, self.weight)
