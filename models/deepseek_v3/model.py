"""DeepSeek-V3 (DeepSeek-AI 2024, arXiv 2412.19437).

Multi-head latent attention in every layer. The first layers have a feed-forward layer, all others experts: some that
all tokens share, and many of which each token uses a few, chosen by sigmoid scores within the best groups. What the
paper adds for training beside that, the prediction of several tokens (section 2.2), is not part of the model here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.deepseek_v3.sizes import DeepSeekV3Sizes
from models.layers.cache import KeyValueCache, LayerCache
from models.layers.decoder import Decoder
from models.layers.feed_forward import FeedForward
from models.layers.latent_attention import LatentAttention
from models.layers.moe import MoE, Selection
from models.layers.norm import build_norm
from models.layers.rope import rotations
from models.layers.sequences import Sequences

# The released code adds this in the norms of latent vectors, whatever the configuration has for the other norms.
LATENT_NORM_EPS = 1e-6


class TransformerBlock(nn.Module):
    """One layer: attention, and a feed-forward layer or experts, each added to the residual stream."""

    def __init__(self, sizes: DeepSeekV3Sizes, *, dense: bool) -> None:
        super().__init__()
        self.attention = LatentAttention(
            dim=sizes.dim,
            n_heads=sizes.n_heads,
            q_lora_rank=sizes.q_lora_rank,
            kv_lora_rank=sizes.kv_lora_rank,
            qk_nope_head_dim=sizes.qk_nope_head_dim,
            qk_rope_head_dim=sizes.qk_rope_head_dim,
            v_head_dim=sizes.v_head_dim,
            norm_eps=LATENT_NORM_EPS,
            scale=1.0 if sizes.rope_scaling is None else sizes.rope_scaling.product_scale,
        )
        self.feed_forward = FeedForward(sizes.dim, sizes.ffn_hidden) if dense else None
        self.moe = None if dense else _experts(sizes)
        self.attention_norm = build_norm(sizes.norm_type, sizes.dim, sizes.norm_eps)
        self.ffn_norm = build_norm(sizes.norm_type, sizes.dim, sizes.norm_eps)

    def forward(
        self, x: Tensor, turns: Tensor, sequences: Sequences, cache: LayerCache | None = None
    ) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        h = x + self.attention(self.attention_norm(x), turns, sequences, cache)
        transform = self.feed_forward if self.moe is None else self.moe
        assert transform is not None
        return h + transform(self.ffn_norm(h))


class Transformer(Decoder):
    """A DeepSeek-V3 model, or the modules of it that are named."""

    sizes: DeepSeekV3Sizes
    residual_outputs = ("wo", "w2", "w3")

    def build_layer(self, index: int) -> TransformerBlock:
        return TransformerBlock(self.sizes, dense=index < self.sizes.n_dense_layers)

    def turns(self, positions: Tensor) -> Tensor:
        sizes = self.sizes
        return rotations(positions, sizes.qk_rope_head_dim, sizes.rope_theta, sizes.rope_scaling)

    def new_cache(
        self,
        batch: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> KeyValueCache:
        """An empty cache of latent vectors and turned keys, which all heads share."""
        latent, rope = self.sizes.kv_lora_rank, self.sizes.qk_rope_head_dim
        return KeyValueCache(tuple(self.layers), batch, capacity, 1, latent, dtype, device, value_dim=rope)


def _experts(sizes: DeepSeekV3Sizes) -> MoE:
    selection = Selection(
        sizes.n_experts,
        sizes.n_experts_per_token,
        score="sigmoid",
        scale=sizes.route_scale,
        groups=sizes.n_expert_groups,
        groups_per_token=sizes.n_groups_per_token,
        biased=True,
    )
    return MoE(sizes.dim, sizes.expert_hidden, selection, sizes.n_shared_experts * sizes.expert_hidden)
