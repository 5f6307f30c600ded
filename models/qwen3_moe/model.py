"""Qwen3 (Yang et al. 2025, Qwen3 Technical Report, arXiv 2505.09388), the mixture-of-experts models.

Attention is that of the dense models. In place of the feed-forward layer each layer has experts, of which each token
uses those with the largest softmax scores, weighed by these; no expert is shared by all tokens.
"""

from __future__ import annotations

from torch import Tensor, nn

from models.layers.attention import Attention
from models.layers.cache import LayerCache
from models.layers.decoder import Decoder
from models.layers.moe import MoE, Selection
from models.layers.norm import build_norm
from models.layers.sequences import Sequences
from models.qwen3_moe.sizes import Qwen3MoESizes


class TransformerBlock(nn.Module):
    """One layer: attention and experts, each added to the residual stream."""

    def __init__(self, sizes: Qwen3MoESizes) -> None:
        super().__init__()
        self.attention = Attention(
            sizes.dim, sizes.n_heads, sizes.n_kv_heads, sizes.head_dim, norm_eps=sizes.norm_eps
        )
        self.moe = MoE(sizes.dim, sizes.expert_hidden, Selection(sizes.n_experts, sizes.n_experts_per_token))
        self.attention_norm = build_norm(sizes.norm_type, sizes.dim, sizes.norm_eps)
        self.ffn_norm = build_norm(sizes.norm_type, sizes.dim, sizes.norm_eps)

    def forward(
        self, x: Tensor, turns: Tensor, sequences: Sequences, cache: LayerCache | None = None
    ) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        h = x + self.attention(self.attention_norm(x), turns, sequences, cache)
        return h + self.moe(self.ffn_norm(h))


class Transformer(Decoder):
    """A Qwen3 mixture-of-experts model, or the modules of it that are named."""

    sizes: Qwen3MoESizes
    residual_outputs = ("wo", "w2", "w3")

    def build_layer(self, index: int) -> TransformerBlock:
        return TransformerBlock(self.sizes)
