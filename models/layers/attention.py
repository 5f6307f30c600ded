"""Causal self-attention with grouped queries and rotary positions."""

from __future__ import annotations

from torch import Tensor, nn

from models.layers.attend import Attend
from models.layers.cache import LayerCache
from models.layers.rope import rotate
from models.layers.sequences import Sequences


class Attention(nn.Module):
    """softmax(q kᵀ / sqrt(D)) v, each key and value head shared by H / KV query heads.

    Vaswani et al. 2017 (arXiv 1706.03762); grouped queries of Ainslie et al. 2023 (arXiv 2305.13245).

    Args:
        dim: features of the hidden state.
        n_heads: of queries (H).
        n_kv_heads: of keys and values (KV).
        head_dim: features of a head (D); H · D need not be `dim`.
        norm_eps: queries and keys are normalised over each head before they are turned (Henry et al. 2020,
            Query-Key Normalization, arXiv 2010.04245; as RMSNorm in Qwen3); None: they are not.
        window: how many tokens each token sees, itself included; None: all before it.
    """

    def __init__(
        self,
        dim: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        norm_eps: float | None = None,
        window: int | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.wq = nn.Linear(dim, n_heads * head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * head_dim, bias=False)
        self.wo = nn.Linear(n_heads * head_dim, dim, bias=False)
        self.q_norm = nn.Identity() if norm_eps is None else nn.RMSNorm(head_dim, eps=norm_eps)
        self.k_norm = nn.Identity() if norm_eps is None else nn.RMSNorm(head_dim, eps=norm_eps)
        self.attend = Attend(window=window)

    def forward(
        self, x: Tensor, turns: Tensor, sequences: Sequences, cache: LayerCache | None = None
    ) -> Tensor:
        """Attend from each token to itself and those before it.

        Args:
            x: (B, T, dim).
            turns: rotations of the T positions, see `models.layers.rope.rotations`.
            sequences: where the T tokens stand.
            cache: keys and values of the tokens before x, to which those of x are added.

        Returns:
            (B, T, dim).
        """
        heads = (-1, self.head_dim)  # their number is left open: tensor parallelism gives each rank a part
        q = self.q_norm(self.wq(x).unflatten(-1, heads))
        k = self.k_norm(self.wk(x).unflatten(-1, heads))
        q = rotate(q, turns).transpose(1, 2)  # (B, H, T, D)
        k = rotate(k, turns).transpose(1, 2)  # (B, KV, T, D)
        v = self.wv(x).unflatten(-1, heads).transpose(1, 2)  # (B, KV, T, D)
        if cache is not None:
            k, v = cache.append(k, v)
        y = self.attend(q, k, v, sequences)
        return self.wo(y.transpose(1, 2).flatten(-2))
