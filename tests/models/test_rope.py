"""Rotary positions: turns, Llama 3.1's scaling against its published code and numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.layers.rope import rotate, rotations, scale_frequencies
from models.sizes import RopeScaling


def published_scaling(frequency: float, scaling: RopeScaling) -> float:
    """`apply_scaling` of Meta's llama-models, for one frequency."""
    wavelength = 2 * math.pi / frequency
    if wavelength < scaling.original_max_seq_len / scaling.high_freq_factor:
        return frequency
    if wavelength > scaling.original_max_seq_len / scaling.low_freq_factor:
        return frequency / scaling.factor
    smooth = (scaling.original_max_seq_len / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


@given(st.floats(1e-6, 1.0), st.sampled_from([8.0, 32.0]))
def test_scaling_equals_the_published_code(frequency: float, factor: float) -> None:
    scaling = RopeScaling(factor=factor)
    scaled = scale_frequencies(torch.tensor([frequency], dtype=torch.float64), scaling).item()
    assert scaled == pytest.approx(published_scaling(frequency, scaling), rel=1e-9)


def test_turns_are_in_fp32_precision_at_distant_positions() -> None:
    positions = torch.tensor([0, 1, 131_071])
    turns = rotations(positions, 128, 500_000.0, None)
    assert turns.dtype == torch.complex64
    assert turns.shape == (3, 1, 64)
    exact = positions.double().unsqueeze(-1) * 500_000.0 ** -(torch.arange(0, 128, 2).double() / 128)
    # fp32 holds an angle of 131,071 radians to 0.008.
    assert (turns.squeeze(1) - torch.polar(torch.ones_like(exact), exact)).abs().max() < 0.02


def test_scores_depend_on_distance_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 1, 16, generator=generator) for _ in range(2))

    def score(q_position: int, k_position: int) -> torch.Tensor:
        turned = [
            rotate(x, rotations(torch.tensor([p]), 16, 10_000.0, None))
            for x, p in ((q, q_position), (k, k_position))
        ]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(5, 2), score(105, 102), rtol=1e-4, atol=1e-5)
    assert (score(5, 2) - score(5, 3)).abs() > 1e-3


def test_neighbouring_features_are_turned_and_position_zero_is_not() -> None:
    x = torch.zeros(1, 2, 1, 4)
    x[..., 0] = 1.0  # the first pair is (1, 0), turned by one radian per position
    turned = rotate(x, rotations(torch.arange(2), 4, 10_000.0, None))
    torch.testing.assert_close(turned[0, 0, 0], torch.tensor([1.0, 0.0, 0.0, 0.0]))
    torch.testing.assert_close(turned[0, 1, 0], torch.tensor([math.cos(1), math.sin(1), 0.0, 0.0]))


def test_bf16_features_are_turned_in_fp32() -> None:
    x = torch.randn(1, 3, 2, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    turns = rotations(torch.tensor([1000, 1001, 1002]), 8, 10_000.0, None)
    turned = rotate(x, turns)
    assert turned.dtype == torch.bfloat16
    torch.testing.assert_close(turned, rotate(x.float(), turns).bfloat16(), rtol=0, atol=0)
