"""Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, arXiv 2405.04434, section 2.1; DeepSeek-V3, arXiv
2412.19437, section 2.1.1): keys and values of all heads are made of one small latent vector per token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.layers.attend import Attend
from models.layers.cache import LayerCache
from models.layers.rope import rotate
from models.layers.sequences import Sequences


class LatentAttention(nn.Module):
    """Attention whose keys and values are wkv_b(kv_norm(latent)), and beside them a turned key that all heads share.

    Args:
        dim: features of the hidden state.
        n_heads: heads (H).
        q_lora_rank: features of the latent vector that queries are made of; 0: they are made of the hidden state.
        kv_lora_rank: features of the latent vector that keys and values are made of (C).
        qk_nope_head_dim: features of a query or key that do not turn with the position (N).
        qk_rope_head_dim: those that do (R).
        v_head_dim: features of a value (V).
        norm_eps: of the norms of the latent vectors.
        scale: the products of queries and keys are multiplied by it, beside 1 / sqrt(N + R).
    """

    def __init__(
        self,
        dim: int,
        n_heads: int,
        q_lora_rank: int,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        norm_eps: float,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.kv_lora_rank = kv_lora_rank
        self.nope, self.rope, self.v = qk_nope_head_dim, qk_rope_head_dim, v_head_dim
        q_dim = n_heads * (self.nope + self.rope)
        self.compresses_queries = q_lora_rank > 0
        if self.compresses_queries:
            self.wq_a = nn.Linear(dim, q_lora_rank, bias=False)
            self.q_norm = nn.RMSNorm(q_lora_rank, eps=norm_eps)
            self.wq_b = nn.Linear(q_lora_rank, q_dim, bias=False)
        else:
            self.wq = nn.Linear(dim, q_dim, bias=False)
        self.wkv_a = nn.Linear(dim, kv_lora_rank + self.rope, bias=False)
        self.kv_norm = nn.RMSNorm(kv_lora_rank, eps=norm_eps)
        self.wkv_b = nn.Linear(kv_lora_rank, n_heads * (self.nope + self.v), bias=False)
        self.wo = nn.Linear(n_heads * self.v, dim, bias=False)
        self.attend = Attend(scale=scale * (self.nope + self.rope) ** -0.5)

    def forward(
        self, x: Tensor, turns: Tensor, sequences: Sequences, cache: LayerCache | None = None
    ) -> Tensor:
        """Attend from each token to itself and those before it.

        Args:
            x: (B, T, dim).
            turns: rotations of the T positions for R features, see `models.layers.rope.rotations`.
            sequences: where the T tokens stand.
            cache: latent vectors and turned keys of the tokens before x, to which those of x are added.

        Returns:
            (B, T, dim).
        """
        # The number of heads is left open: tensor parallelism gives each rank a part.
        q = self.wq_b(self.q_norm(self.wq_a(x))) if self.compresses_queries else self.wq(x)
        q_nope, q_rope = q.unflatten(-1, (-1, self.nope + self.rope)).split([self.nope, self.rope], dim=-1)
        q_rope = rotate(q_rope, turns)  # (B, T, H, R)
        latent, k_rope = self.wkv_a(x).split([self.kv_lora_rank, self.rope], dim=-1)
        latent = self.kv_norm(latent)  # (B, T, C)
        k_rope = rotate(k_rope.unsqueeze(-2), turns)  # (B, T, 1, R)
        if cache is not None:
            y = self._attend_to_latents(q_nope, q_rope, latent, k_rope, sequences, cache)
        else:
            kv = self.wkv_b(latent).unflatten(-1, (-1, self.nope + self.v))
            k_nope, v = kv.split([self.nope, self.v], dim=-1)  # (B, T, H, N), (B, T, H, V)
            q = torch.cat((q_nope, q_rope), dim=-1)
            k = torch.cat((k_nope, k_rope.expand(-1, -1, k_nope.shape[2], -1)), dim=-1)
            y = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), sequences)
        return self.wo(y.transpose(1, 2).flatten(-2))

    def _attend_to_latents(
        self,
        q_nope: Tensor,
        q_rope: Tensor,
        latent: Tensor,
        k_rope: Tensor,
        sequences: Sequences,
        cache: LayerCache,
    ) -> Tensor:
        """The same with wkv_b moved to the other side of the products, so that only latent vectors are kept.

        With wkv_b = (K, V) of one head, q · (K latent) = (Kᵀ q) · latent, and Σ p (V latent) = V Σ p latent
        (DeepSeek-V2, section 2.1.2). So each head attends to the same C + R features of each token.

        Returns:
            (B, H, T, V).
        """
        # (H, N + V, C); by its input's width, since a rank may hold some of the heads.
        wkv_b = self.wkv_b.weight.unflatten(0, (-1, self.nope + self.v))
        to_latent, to_value = wkv_b.split([self.nope, self.v], dim=1)
        q_latent = torch.einsum("bthn,hnc->bthc", q_nope, to_latent)
        q = torch.cat((q_latent, q_rope), dim=-1).transpose(1, 2)  # (B, H, T, C + R)
        latents, k_ropes = cache.append(
            latent.unsqueeze(1), k_rope.transpose(1, 2)
        )  # (B, 1, S, C), (B, 1, S, R)
        k = torch.cat((latents, k_ropes), dim=-1)
        y = self.attend(q, k, latents, sequences)  # (B, H, T, C)
        return torch.einsum("bhtc,hvc->bhtv", y, to_value)
