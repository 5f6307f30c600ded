"""Sizes of the dense Qwen3 models as plain data: dimensions, parameter names and shapes, operations per token.

Sources: Yang et al. 2025, Qwen3 Technical Report (arXiv 2505.09388), table 1; the released parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType

from models.activations import Kernels, Saved
from models.decoder_sizes import DecoderSizes, NormType
from models.grouped_attention import GroupedAttention
from models.qwen3.activations import layer_saved
from models.size_problems import norm_problems, not_above_zero, not_positive
from models.sizes import SizesError, YarnScaling


@dataclass(frozen=True)
class Qwen3Sizes(DecoderSizes):
    """The sizes of one model. Raises SizesError with every reason why no model can have them.

    Attributes:
        dim: features of the hidden state.
        n_layers: how many layers.
        n_heads: heads of queries.
        n_kv_heads: heads of keys and values; divides n_heads.
        head_dim: features of a head; n_heads · head_dim need not be dim.
        ffn_hidden: features within the feed-forward layers.
        vocab_size: rows of embedding and output.
        max_seq_len: the longest sequence that the published model was trained on.
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
    ffn_hidden: int
    vocab_size: int
    max_seq_len: int
    norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    rope_scaling: YarnScaling | None = None
    tie_embeddings: bool = False
    norm_type: NormType = "rmsnorm"

    def __post_init__(self) -> None:
        counts = ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_hidden")
        problems = (
            *not_positive(self, (*counts, "vocab_size", "max_seq_len")),
            *not_above_zero(self, ("norm_eps", "rope_theta")),
            *norm_problems(self.norm_type),
            *self.attention.problems(),
        )
        if problems:
            raise SizesError(problems)

    @property
    def attention(self) -> GroupedAttention:
        return GroupedAttention(self.dim, self.n_heads, self.n_kv_heads, self.head_dim)

    def layer_shapes(self, layer: str) -> dict[str, tuple[int, ...]]:
        return {
            **self.attention.shapes(f"{layer}.attention"),
            f"{layer}.feed_forward.w1.weight": (self.ffn_hidden, self.dim),
            f"{layer}.feed_forward.w2.weight": (self.dim, self.ffn_hidden),
            f"{layer}.feed_forward.w3.weight": (self.ffn_hidden, self.dim),
            **self.norm_shapes(f"{layer}.attention_norm"),
            **self.norm_shapes(f"{layer}.ffn_norm"),
        }

    def layer_flops(self, layer: str, seq_len: int) -> int:
        return self.attention.flops(seq_len) + 6 * 3 * self.dim * self.ffn_hidden

    def layer_saved(self, layer: str, element: int, kernels: Kernels) -> Saved:
        return layer_saved(self, element, kernels)


_8B = Qwen3Sizes(
    dim=4096,
    n_layers=36,
    n_heads=32,
    n_kv_heads=8,
    head_dim=128,
    ffn_hidden=12288,
    vocab_size=151_936,
    max_seq_len=40_960,
)
_4B = replace(_8B, dim=2560, ffn_hidden=9728, tie_embeddings=True)
_1_7B = replace(_4B, dim=2048, n_layers=28, n_heads=16, ffn_hidden=6144)

QWEN3 = MappingProxyType(
    {
        # Ours: for a laptop. Eight layers, so that 4 ranks can hold 2 stages each; heads wider than dim / n_heads.
        "debug": replace(
            _8B, dim=256, n_layers=8, n_heads=8, n_kv_heads=4, head_dim=48, ffn_hidden=512, vocab_size=2048
        ),
        "0.6B": replace(_1_7B, dim=1024, ffn_hidden=3072),
        "1.7B": _1_7B,
        "4B": _4B,
        "8B": _8B,
        "14B": replace(_8B, dim=5120, n_layers=40, n_heads=40, ffn_hidden=17408),
        "32B": replace(_8B, dim=5120, n_layers=64, n_heads=64, ffn_hidden=25600),
    }
)
