"""Rotary positions (Su et al. 2021, RoFormer, arXiv 2104.09864), with the scaling of Llama 3.1 and YaRN.

Neighbouring features (2i, 2i + 1) of a head form the pair that is turned by position · theta^(-2i / head_dim),
as in the paper and in Meta's weights. Hugging Face pairs feature i with i + head_dim / 2 instead: its weights
for wq and wk have their rows permuted, and conversion must permute them back.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from models.sizes import RopeScaling, YarnScaling


def rotations(
    positions: Tensor, head_dim: int, theta: float, scaling: RopeScaling | YarnScaling | None
) -> Tensor:
    """The turn of every pair at every position: cos + i sin, complex64.

    Args:
        positions: (T,) or (B, T), integers.
        head_dim: features of one head.
        theta: base of the wavelengths.
        scaling: see `scale_frequencies` and `yarn_frequencies`.

    Returns:
        (T, 1, head_dim / 2) or (B, T, 1, head_dim / 2); the dimension of 1 is for the heads. Complex numbers
        also pass unharmed through FSDP, which casts floating-point arguments to bf16, in which positions
        beyond 256 run together.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    frequencies = theta**-exponents  # radians per position
    amplitude = 1.0
    match scaling:
        case RopeScaling():
            frequencies = scale_frequencies(frequencies, scaling)
        case YarnScaling():
            frequencies = yarn_frequencies(frequencies, head_dim, theta, scaling)
            amplitude = scaling.amplitude
    angles = positions.float().unsqueeze(-1) * frequencies
    return torch.polar(torch.full_like(angles, amplitude), angles).unsqueeze(-2)


def scale_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: slow turns are slowed by `factor`, fast ones kept, those between blended."""
    turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)  # over the original context
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def yarn_frequencies(frequencies: Tensor, head_dim: int, theta: float, scaling: YarnScaling) -> Tensor:
    """YaRN, section 3.2: as `scale_frequencies`, but blended evenly over the pairs between the two limits."""

    def pair_that_turns(times: float) -> float:
        """The place of the pair that turns so often over the original context."""
        wavelength = scaling.original_max_seq_len / (2 * math.pi * times)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    first = max(math.floor(pair_that_turns(scaling.beta_fast)), 0)
    last = min(math.ceil(pair_that_turns(scaling.beta_slow)), head_dim - 1)
    place = torch.arange(len(frequencies), dtype=torch.float32, device=frequencies.device)
    slowed = ((place - first) / max(last - first, 0.001)).clamp(0, 1)
    return slowed * frequencies / scaling.factor + (1 - slowed) * frequencies


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Turn each pair of features of x (B, T, H, D) by `turns` (…, T, 1, D / 2), in fp32; same type as x."""
    pairs = x.float().unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():
        # The compiler fuses real arithmetic and has no complex; eager code is five times faster with complex.
        cos, sin = torch.view_as_real(turns).unbind(-1)
        real, imaginary = pairs.unbind(-1)
        turned = torch.stack((real * cos - imaginary * sin, real * sin + imaginary * cos), dim=-1)
    else:
        turned = torch.view_as_real(torch.view_as_complex(pairs) * turns)
    return turned.flatten(-2).type_as(x)
