"""Normalisation of the hidden state, over its last dimension."""

from __future__ import annotations

from torch import nn


def build_norm(norm_type: str, dim: int, eps: float) -> nn.Module:
    """A norm for hidden states (..., dim). Raises ValueError for a type that is not among these.

    - "rmsnorm": x / sqrt(mean(x²) + eps) · weight (Zhang and Sennrich 2019, arXiv 1910.07467)
    - "layernorm": (x - mean(x)) / sqrt(var(x) + eps) · weight (Ba et al. 2016, arXiv 1607.06450)
    - "np_layernorm": the same without a weight

    Statistics are taken in fp32 whatever the type of x.
    """
    match norm_type:
        case "rmsnorm":
            return nn.RMSNorm(dim, eps=eps)
        case "layernorm":
            return nn.LayerNorm(dim, eps=eps, bias=False)
        case "np_layernorm":
            return nn.LayerNorm(dim, eps=eps, elementwise_affine=False)
    raise ValueError(f"norm_type must be rmsnorm, layernorm or np_layernorm, got {norm_type!r}")
