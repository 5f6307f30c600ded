"""YaRN: frequencies and factors against the published formulas, pair by pair."""

from __future__ import annotations

import math

import pytest
import torch

from models.deepseek_v3.sizes import DEEPSEEK_V3
from models.layers.rope import rotations
from models.sizes import YarnScaling

DEEPSEEK = DEEPSEEK_V3["671B"].rope_scaling
QWEN3 = YarnScaling(factor=4.0, original_max_seq_len=32_768)


def published(head_dim: int, theta: float, scaling: YarnScaling) -> list[float]:
    """Radians per position of each pair: sections 3.1 and 3.2 of arXiv 2309.00071, with the limits of the released code,
    which rounds them to pairs."""
    result = []

    def limit(turns: float) -> float:
        return (
            head_dim * math.log(scaling.original_max_seq_len / (turns * 2 * math.pi)) / (2 * math.log(theta))
        )

    low = max(math.floor(limit(scaling.beta_fast)), 0)
    high = min(math.ceil(limit(scaling.beta_slow)), head_dim - 1)
    for pair in range(head_dim // 2):
        kept = theta ** (-2 * pair / head_dim)
        ramp = min(max((pair - low) / (high - low), 0.0), 1.0)
        result.append((1 - ramp) * kept + ramp * kept / scaling.factor)
    return result


@pytest.mark.parametrize(
    ("head_dim", "theta", "scaling"),
    [(64, 10_000.0, DEEPSEEK), (128, 1_000_000.0, QWEN3)],
    ids=["DeepSeek-V3", "Qwen3"],
)
def test_each_pair_turns_as_published(head_dim: int, theta: float, scaling: YarnScaling) -> None:
    turns = rotations(torch.tensor([1]), head_dim, theta, scaling).flatten()
    torch.testing.assert_close(turns.angle(), torch.tensor(published(head_dim, theta, scaling)))
    slow, fast = turns[-1].angle().item(), turns[0].angle().item()
    assert fast == pytest.approx(1.0)
    assert slow == pytest.approx(theta ** (-(head_dim - 2) / head_dim) / scaling.factor, rel=1e-4)


def test_deepseek_sharpens_the_products_and_leaves_the_turned_features_as_long_as_they_were() -> None:
    """Its released code: softmax scale × (0.1 ln 40 + 1)²."""
    assert DEEPSEEK is not None
    assert DEEPSEEK.amplitude == 1.0
    assert DEEPSEEK.product_scale == pytest.approx((0.1 * math.log(40) + 1) ** 2)


def test_without_a_factor_for_all_features_only_what_is_turned_is_sharpened() -> None:
    """The paper, equation 15, and Qwen3: 0.1 ln s + 1."""
    assert QWEN3.amplitude == pytest.approx(0.1 * math.log(4) + 1)
    assert QWEN3.product_scale == 1.0
    turns = rotations(torch.arange(5), 128, 1e6, QWEN3)
    torch.testing.assert_close(turns.abs(), torch.full_like(turns.abs(), QWEN3.amplitude))


def test_a_factor_of_one_changes_nothing() -> None:
    none = rotations(torch.arange(9), 64, 1e4, None)
    torch.testing.assert_close(
        rotations(torch.arange(9), 64, 1e4, YarnScaling(factor=1.0, mscale_all_dim=1.0)), none
    )
    assert YarnScaling(factor=1.0, mscale_all_dim=1.0).product_scale == 1.0
