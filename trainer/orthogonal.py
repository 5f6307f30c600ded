"""The matrix nearest to being orthogonal, and how large a step with it is: the mathematics of Muon.

Jordan et al. 2024, Muon: an optimizer for hidden layers in neural networks (kellerjordan.github.io/posts/muon);
Liu et al. 2025, Muon is scalable for LLM training (arXiv 2502.16982).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_STEPS = 5
# Of the quintic a x + b x³ + c x⁵, chosen for the steepest slope at 0 (Jordan et al.): singular values end between
# 0.7 and 1.2, which trains as well as exactly 1.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_EPS = 1e-7


def orthogonalized(matrices: Tensor) -> Tensor:
    """U Vᵀ of the singular value decomposition U S Vᵀ of each matrix, nearly, by five Newton-Schulz iterations.

    Args:
        matrices: (..., M, N), each matrix on its own. On an accelerator in bfloat16, which is enough and fast.

    Returns:
        (..., M, N) in the same format. A matrix of zeros stays one.
    """
    x = matrices
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    # The spectral norm is at most the Frobenius norm: from here on at most 1.
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x.mT if tall else x


def scale(rows: int, columns: int, kind: str) -> float:
    """What the orthogonalised update of a matrix (rows, columns) is multiplied by.

    "match_rms_adamw" gives it the root mean square of AdamW's updates, 0.2, so that both take the same learning rate
    and weight decay (Liu et al., section 2.2). "original" keeps the operator norm (Jordan et al.).
    """
    if kind == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def format_of_products(device: torch.device) -> torch.dtype:
    """In which format to iterate: bfloat16 where matrix products in it are fast."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16
