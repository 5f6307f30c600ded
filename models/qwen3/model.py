"""Qwen3 (Yang et al. 2025, Qwen3 Technical Report, arXiv 2505.09388), the dense models.

As Llama, with two differences: queries and keys are normalised over each head before they are turned, and the width
of a head is a size of its own. Small models tie their output to the embedding.
"""

from __future__ import annotations

from torch import Tensor, nn

from models.layers.attention import Attention
from models.layers.cache import LayerCache
from models.layers.decoder import Decoder
from models.layers.feed_forward import FeedForward
from models.layers.norm import build_norm
from models.layers.sequences import Sequences
from models.qwen3.sizes import Qwen3Sizes


class TransformerBlock(nn.Module):
    """One layer: attention and feed-forward, each added to the residual stream."""

    def __init__(self, sizes: Qwen3Sizes) -> None:
        super().__init__()
        self.attention = Attention(
            sizes.dim, sizes.n_heads, sizes.n_kv_heads, sizes.head_dim, norm_eps=sizes.norm_eps
        )
        self.feed_forward = FeedForward(sizes.dim, sizes.ffn_hidden)
        self.attention_norm = build_norm(sizes.norm_type, sizes.dim, sizes.norm_eps)
        self.ffn_norm = build_norm(sizes.norm_type, sizes.dim, sizes.norm_eps)

    def forward(
        self, x: Tensor, turns: Tensor, sequences: Sequences, cache: LayerCache | None = None
    ) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        h = x + self.attention(self.attention_norm(x), turns, sequences, cache)
        return h + self.feed_forward(self.ffn_norm(h))


class Transformer(Decoder):
    """A Qwen3 model, or the modules of it that are named."""

    sizes: Qwen3Sizes
    residual_outputs = ("wo", "w2", "w3")

    def build_layer(self, index: int) -> TransformerBlock:
        return TransformerBlock(self.sizes)
