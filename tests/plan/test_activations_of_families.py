"""What the layers of each family keep for their backward: by arithmetic, by looking, and on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from models.activations import Kernels
from models.layers.sequences import Sequences
from models.registry import family
from tests.plan.measure import debug_config, measure
from tests.plan.test_activations import FusedNorm, bytes_kept
from trainer.plan.memory import forecast_memory
from trainer.plan.plan import make_plan

LAYERS = {
    "qwen3": ("qwen3", 0),
    "qwen3_moe": ("qwen3_moe", 0),
    "deepseek_v3, dense": ("deepseek_v3", 0),
    "deepseek_v3, experts": ("deepseek_v3", 1),
}
B, T = 2, 64


def kept_by_layer(name: str, index: int, dtype: torch.dtype) -> int:
    model = family(name).build(family(name).sizes["debug"], (f"layers.{index}",))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    model.to(dtype)
    layer = model.layers[str(index)]
    sequences = Sequences.in_order(T, torch.device("cpu"))
    turns = model.turns(sequences.positions)
    x = torch.randn(B, T, model.sizes.dim, dtype=dtype, requires_grad=True)
    return bytes_kept(lambda: layer(x, turns, sequences), list(layer.parameters()))


def predicted(name: str, index: int, element: int, kernels: Kernels) -> int:
    """Per token and position, and, with experts, what does not grow with the sequence: a count for each expert and
    sequence, and where the rows of each expert end."""
    sizes = family(name).sizes["debug"]
    saved = sizes.saved(f"layers.{index}", element, kernels)
    has_experts = any("experts" in parameter for parameter in sizes.parameter_shapes(f"layers.{index}"))
    constant = sizes.n_experts * (8 * B + 4) if has_experts else 0
    return saved.whole * B * T + saved.per_sequence * T + constant


@pytest.mark.parametrize(("name", "index"), LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_keeps_exactly_what_is_predicted(
    name: str, index: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the norms of the CPU, and with such as keep what an accelerator's keep."""
    assert kept_by_layer(name, index, dtype) == predicted(name, index, dtype.itemsize, Kernels.CPU)
    monkeypatch.setattr(nn.RMSNorm, "forward", lambda norm, x: FusedNorm.apply(x, norm.weight))
    assert kept_by_layer(name, index, dtype) == predicted(name, index, dtype.itemsize, Kernels.ACCELERATOR)


@pytest.mark.parametrize(
    ("name", "world_size", "experimental"),
    [
        ("qwen3_moe", 1, {}),
        pytest.param("qwen3", 1, {}, marks=pytest.mark.slow),
        pytest.param(
            "deepseek_v3",
            2,
            {
                "pipeline_parallel_degree": 2,
                "pipeline_parallel_schedule": "ZBVZeroBubble",
                "pipeline_parallel_microbatches": 4,
            },
            marks=pytest.mark.slow,
        ),
    ],
)
def test_memory_of_real_ranks_is_predicted(
    tmp_path: Path, name: str, world_size: int, experimental: dict[str, Any]
) -> None:
    """State exactly, activations and all that is alive within a tenth; weights of experts are deferred too."""
    config = debug_config({"model": {"name": name}, "experimental": experimental})
    plan = make_plan(config, world_size)
    forecast = forecast_memory(plan, Kernels.CPU)
    for rank, measured in enumerate(measure(config, world_size, tmp_path)):
        expected = forecast[plan.layout.pipeline_rank(rank)]
        state, peak = expected.state, expected.peak
        assert measured.parameters == state.parameters
        assert measured.gradients == state.gradients
        assert measured.optimizer == state.optimizer
        assert measured.activations == pytest.approx(expected.activations, rel=0.1)
        assert measured.alive == pytest.approx(peak.total - peak.parameters - peak.optimizer, rel=0.1)
