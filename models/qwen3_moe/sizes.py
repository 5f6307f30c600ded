"""Sizes of the Qwen3 mixture-of-experts models as plain data.

Sources: Yang et al. 2025, Qwen3 Technical Report (arXiv 2505.09388), table 2; the released parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType

from models.activations import Kernels, Saved
from models.decoder_sizes import DecoderSizes, NormType
from models.grouped_attention import GroupedAttention
from models.mixture import Balancing, Mixture
from models.qwen3_moe.activations import layer_saved
from models.size_problems import norm_problems, not_above_zero, not_positive
from models.sizes import SizesError, YarnScaling


@dataclass(frozen=True)
class Qwen3MoESizes(DecoderSizes):
    """The sizes of one model. Raises SizesError with every reason why no model can have them.

    Attributes:
        dim: features of the hidden state.
        n_layers: how many layers.
        n_heads: heads of queries.
        n_kv_heads: heads of keys and values; divides n_heads.
        head_dim: features of a head; n_heads · head_dim need not be dim.
        expert_hidden: features within each expert.
        n_experts: experts of a layer.
        n_experts_per_token: how many of them each token goes through.
        vocab_size: rows of embedding and output.
        max_seq_len: how many positions the published configuration allows.
        norm_eps: added to the mean square in every norm.
        rope_theta: base of the rotary wavelengths.
        rope_scaling: YaRN, for longer sequences.
        tie_embeddings: whether the output is the embedding.
        norm_type: of the hidden state; those of queries and keys are always RMSNorm.
    """

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    expert_hidden: int
    n_experts: int
    n_experts_per_token: int
    vocab_size: int
    max_seq_len: int
    norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    rope_scaling: YarnScaling | None = None
    tie_embeddings: bool = False
    norm_type: NormType = "rmsnorm"

    def __post_init__(self) -> None:
        heads = ("n_heads", "n_kv_heads", "head_dim")
        problems = (
            *not_positive(self, ("dim", "n_layers", *heads, "expert_hidden", "n_experts")),
            *not_positive(self, ("vocab_size", "max_seq_len")),
            *not_above_zero(self, ("norm_eps", "rope_theta")),
            *norm_problems(self.norm_type),
            *self.attention.problems(),
            *self.mixture.problems(),
        )
        if problems:
            raise SizesError(problems)

    @property
    def attention(self) -> GroupedAttention:
        return GroupedAttention(self.dim, self.n_heads, self.n_kv_heads, self.head_dim)

    @property
    def mixture(self) -> Mixture:
        return Mixture(self.dim, self.expert_hidden, self.n_experts, self.n_experts_per_token)

    @property
    def balancing(self) -> Balancing:
        """The factor is that of the published configurations; the report (section 2) balances over the global batch,
        here it is over each sequence, whatever the layout."""
        return Balancing(loss=0.001)

    def layer_shapes(self, layer: str) -> dict[str, tuple[int, ...]]:
        return {
            **self.attention.shapes(f"{layer}.attention"),
            **self.mixture.shapes(f"{layer}.moe"),
            **self.norm_shapes(f"{layer}.attention_norm"),
            **self.norm_shapes(f"{layer}.ffn_norm"),
        }

    def idle_parameters(self, module: str) -> int:
        return self.mixture.idle if module.startswith("layers.") else 0

    def layer_flops(self, layer: str, seq_len: int) -> int:
        return self.attention.flops(seq_len) + 6 * self.mixture.active

    def layer_saved(self, layer: str, element: int, kernels: Kernels) -> Saved:
        return layer_saved(self, element, kernels)


_30B = Qwen3MoESizes(
    dim=2048,
    n_layers=48,
    n_heads=32,
    n_kv_heads=4,
    head_dim=128,
    expert_hidden=768,
    n_experts=128,
    n_experts_per_token=8,
    vocab_size=151_936,
    max_seq_len=40_960,
)

QWEN3_MOE = MappingProxyType(
    {
        # Ours: for a laptop. Eight layers, so that 4 ranks can hold 2 stages each.
        "debug": replace(
            _30B,
            dim=256,
            n_layers=8,
            n_heads=8,
            head_dim=48,
            expert_hidden=128,
            n_experts=16,
            n_experts_per_token=4,
            vocab_size=2048,
        ),
        "30B-A3B": _30B,
        "235B-A22B": replace(_30B, dim=4096, n_layers=94, n_heads=64, expert_hidden=1536),
    }
)
