"""Sizes of the Llama family as plain data: dimensions, parameter names and shapes, operations per token.

Sources: Touvron et al. 2023, Llama 2 (arXiv 2307.09288), table 1 and the released parameters; Grattafiori et
al. 2024, The Llama 3 Herd of Models (arXiv 2407.21783), table 3; the released parameters of Llama 3.1 and 3.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, get_args

from models.sizes import RopeScaling, SizesError

NormType = Literal["rmsnorm", "layernorm", "np_layernorm"]


@dataclass(frozen=True)
class LlamaSizes:
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

    def __post_init__(self) -> None:
        problems = _problems(self)
        if problems:
            raise SizesError(problems)

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    def modules(self) -> tuple[str, ...]:
        """All modules in the order in which the forward pass meets them."""
        layers = tuple(f"layers.{index}" for index in range(self.n_layers))
        return ("tok_embeddings", *layers, "norm", "output")

    def parameter_shapes(self, module: str) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter of a module, by its full name. Raises KeyError if there is no such module.

        A matrix is (features out, features in). The output has no parameter of its own if it is tied to the
        embedding.
        """
        if module not in self.modules():
            raise KeyError(f"no module {module!r} in a model of {self.n_layers} layers")
        if module == "tok_embeddings":
            return {"tok_embeddings.weight": (self.vocab_size, self.dim)}
        if module == "norm":
            return self._norm_shapes("norm")
        if module == "output":
            return {} if self.tie_embeddings else {"output.weight": (self.vocab_size, self.dim)}
        return self._layer_shapes(module)

    def parameter_count(self, module: str | None = None) -> int:
        """Parameters of one module, or of the whole model."""
        modules = self.modules() if module is None else (module,)
        return sum(math.prod(shape) for name in modules for shape in self.parameter_shapes(name).values())

    def flops_per_token(self, seq_len: int, module: str | None = None) -> int:
        """Floating-point operations of forward and backward for one token, of one module or of the whole model.

        Six per weight of a matrix product, and 12 · dim · seq_len for the two products of attention, causal
        masking not deducted: the model FLOPs of Chowdhery et al. 2022, PaLM (arXiv 2204.02311), appendix B.
        """
        modules = self.modules() if module is None else (module,)
        return sum(self._module_flops(name, seq_len) for name in modules)

    def _module_flops(self, module: str, seq_len: int) -> int:
        if module in ("tok_embeddings", "norm"):
            return 0  # a look-up, and a few operations per feature
        if module == "output":
            return 6 * self.vocab_size * self.dim
        matrices = (shape for shape in self.parameter_shapes(module).values() if len(shape) == 2)
        return 6 * sum(math.prod(shape) for shape in matrices) + 12 * self.dim * seq_len

    def _layer_shapes(self, layer: str) -> dict[str, tuple[int, ...]]:
        kv_dim = self.n_kv_heads * self.head_dim
        return {
            f"{layer}.attention.wq.weight": (self.dim, self.dim),
            f"{layer}.attention.wk.weight": (kv_dim, self.dim),
            f"{layer}.attention.wv.weight": (kv_dim, self.dim),
            f"{layer}.attention.wo.weight": (self.dim, self.dim),
            f"{layer}.feed_forward.w1.weight": (self.ffn_hidden, self.dim),
            f"{layer}.feed_forward.w2.weight": (self.dim, self.ffn_hidden),
            f"{layer}.feed_forward.w3.weight": (self.ffn_hidden, self.dim),
            **self._norm_shapes(f"{layer}.attention_norm"),
            **self._norm_shapes(f"{layer}.ffn_norm"),
        }

    def _norm_shapes(self, norm: str) -> dict[str, tuple[int, ...]]:
        return {} if self.norm_type == "np_layernorm" else {f"{norm}.weight": (self.dim,)}


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
        # Ours: Llama 3.2 1B with an output of its own, so that the model can be cut into stages.
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
