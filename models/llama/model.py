"""Llama (Touvron et al. 2023, arXiv 2307.09288; Grattafiori et al. 2024, arXiv 2407.21783).

A decoder-only transformer: norms before each sub-layer, rotary positions, grouped-query attention, SwiGLU, no
biases, tied or untied embeddings. It has no buffers. A sliding window, which Llama does not have, is that of Mistral 7B
(Jiang et al. 2023, arXiv 2310.06825, section 2).
"""

from __future__ import annotations

from torch import Tensor, nn

from models.layers.attention import Attention
from models.layers.cache import LayerCache
from models.layers.decoder import Decoder
from models.layers.feed_forward import FeedForward
from models.layers.norm import build_norm
from models.layers.sequences import Sequences
from models.llama.sizes import LlamaSizes


class TransformerBlock(nn.Module):
    """One layer: attention and feed-forward, each added to the residual stream."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.attention = Attention(
            sizes.dim, sizes.n_heads, sizes.n_kv_heads, sizes.head_dim, window=sizes.sliding_window
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
    """A Llama model, or the modules of it that are named."""

    sizes: LlamaSizes
    residual_outputs = ("wo", "w2", "w3")

    def build_layer(self, index: int) -> TransformerBlock:
        return TransformerBlock(self.sizes)
