"""Sizes of the Llama family as plain data: dimensions, parameter names and shapes, operations per token.

Sources: Touvron et al. 2023, Llama 2 (arXiv 2307.09288), table 1 and the released parameters; Grattafiori et
al. 2024, The Llama 3 Herd of Models (arXiv 2407.21783), table 3; the released parameters of Llama 3.1, 3.2 and 3.3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import get_args

from models.activations import Kernels, Saved
from models.decoder_sizes import DecoderSizes, NormType
from models.llama.activations import layer_saved
from models.sizes import RopeScaling, SizesError


@dataclass(frozen=True)
class LlamaSizes(DecoderSizes):
    """The sizes of one model. Raises SizesError with every reason why no model can have them."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_hidden: int
    vocab_size: int
    max_seq_len: int
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    norm_type: NormType = "rmsnorm"
    sliding_window: int | None = None  # how many tokens each token sees, itself included; None: all before it

    def __post_init__(self) -> None:
        problems = _problems(self)
        if problems:
            raise SizesError(problems)

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    def layer_shapes(self, layer: str) -> dict[str, tuple[int, ...]]:
        kv_dim = self.n_kv_heads * self.head_dim
        return {
            f"{layer}.attention.wq.weight": (self.dim, self.dim),
            f"{layer}.attention.wk.weight": (kv_dim, self.dim),
            f"{layer}.attention.wv.weight": (kv_dim, self.dim),
            f"{layer}.attention.wo.weight": (self.dim, self.dim),
            f"{layer}.feed_forward.w1.weight": (self.ffn_hidden, self.dim),
            f"{layer}.feed_forward.w2.weight": (self.dim, self.ffn_hidden),
            f"{layer}.feed_forward.w3.weight": (self.ffn_hidden, self.dim),
            **self.norm_shapes(f"{layer}.attention_norm"),
            **self.norm_shapes(f"{layer}.ffn_norm"),
        }

    def layer_flops(self, layer: str, seq_len: int) -> int:
        """Six per weight, and 12 · dim for each token that is seen, for the two products of attention."""
        seen = seq_len if self.sliding_window is None else min(seq_len, self.sliding_window)
        matrices = (shape for shape in self.parameter_shapes(layer).values() if len(shape) == 2)
        return 6 * sum(math.prod(shape) for shape in matrices) + 12 * self.dim * seen

    def layer_saved(self, layer: str, element: int, kernels: Kernels) -> Saved:
        return layer_saved(self, element, kernels)


def _problems(sizes: LlamaSizes) -> tuple[str, ...]:
    counts = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_hidden", "vocab_size", "max_seq_len")
    problems = [
        f"{name} must be at least 1, got {getattr(sizes, name)}"
        for name in counts
        if getattr(sizes, name) < 1
    ]
    problems += [
        f"{name} must be above 0, got {getattr(sizes, name)}"
        for name in ("norm_eps", "rope_theta")
        if not getattr(sizes, name) > 0
    ]
    if sizes.sliding_window is not None and sizes.sliding_window < 1:
        problems.append(f"sliding_window must be at least 1, got {sizes.sliding_window}")
    if sizes.norm_type not in get_args(NormType):
        problems.append(f"norm_type must be one of {', '.join(get_args(NormType))}, got {sizes.norm_type!r}")
    if sizes.n_heads >= 1 and sizes.dim % sizes.n_heads != 0:
        problems.append(f"dim {sizes.dim} is not divisible by n_heads {sizes.n_heads}")
    elif sizes.n_heads >= 1 and sizes.head_dim % 2 != 0:
        problems.append(
            f"dim {sizes.dim} / n_heads {sizes.n_heads} = {sizes.head_dim} is odd: rotary positions turn pairs"
        )
    if sizes.n_kv_heads >= 1 and sizes.n_heads % sizes.n_kv_heads != 0:
        problems.append(f"n_heads {sizes.n_heads} is not divisible by n_kv_heads {sizes.n_kv_heads}")
    return tuple(problems)


_LLAMA2_7B = LlamaSizes(
    dim=4096, n_layers=32, n_heads=32, n_kv_heads=32, ffn_hidden=11008, vocab_size=32000, max_seq_len=4096
)

LLAMA2 = MappingProxyType(
    {
        "7B": _LLAMA2_7B,
        "13B": replace(_LLAMA2_7B, dim=5120, n_layers=40, n_heads=40, n_kv_heads=40, ffn_hidden=13824),
        "70B": replace(_LLAMA2_7B, dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, ffn_hidden=28672),
    }
)

_LLAMA3_8B = LlamaSizes(
    dim=4096,
    n_layers=32,
    n_heads=32,
    n_kv_heads=8,
    ffn_hidden=14336,
    vocab_size=128256,
    max_seq_len=8192,
    rope_theta=500_000.0,
)

LLAMA3 = MappingProxyType(
    {
        # Ours, not Meta's: for a laptop. Eight layers, so that 4 ranks can hold 2 stages each.
        "debug": replace(
            _LLAMA3_8B, dim=256, n_layers=8, n_heads=8, n_kv_heads=4, ffn_hidden=512, vocab_size=2048
        ),
        # Ours: Llama 3.2 1B with an output of its own and without scaled rotary positions.
        "1B": replace(_LLAMA3_8B, dim=2048, n_layers=16, ffn_hidden=8192),
        "8B": _LLAMA3_8B,
        "70B": replace(_LLAMA3_8B, dim=8192, n_layers=80, n_heads=64, ffn_hidden=28672),
        "405B": replace(_LLAMA3_8B, dim=16384, n_layers=126, n_heads=128, ffn_hidden=53248),
    }
)

LLAMA3_1 = MappingProxyType(
    {
        flavor: replace(LLAMA3[flavor], max_seq_len=131_072, rope_scaling=RopeScaling())
        for flavor in ("8B", "70B", "405B")
    }
)

_LLAMA3_2_1B = replace(
    LLAMA3["1B"], max_seq_len=131_072, rope_scaling=RopeScaling(factor=32.0), tie_embeddings=True
)

LLAMA3_2 = MappingProxyType(
    {
        "1B": _LLAMA3_2_1B,
        "3B": replace(_LLAMA3_2_1B, dim=3072, n_layers=28, n_heads=24),
    }
)

LLAMA3_3 = MappingProxyType({"70B": LLAMA3_1["70B"]})
