"""Sizes of Qwen3 and DeepSeek-V3 as plain arithmetic: published counts, what a token uses, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from models import registry
from models.sizes import SizesError, YarnScaling, apply_overrides

# Of the released parameters, a tied output counted once; those of DeepSeek-V3 without the module that predicts more
# tokens (14 billion), and without the biases of experts, which are not trained.
PUBLISHED = {
    ("qwen3", "0.6B"): 596_049_920,
    ("qwen3", "1.7B"): 1_720_574_976,
    ("qwen3", "4B"): 4_022_468_096,
    ("qwen3", "8B"): 8_190_735_360,
    ("qwen3", "14B"): 14_768_307_200,
    ("qwen3", "32B"): 32_762_123_264,
    ("qwen3_moe", "30B-A3B"): 30_532_122_624,
    ("qwen3_moe", "235B-A22B"): 235_093_634_560,
    ("deepseek_v3", "16B"): 15_960_108_544,
    ("deepseek_v3", "671B"): 671_026_404_352,
}
# In billions, as the reports say: Qwen3 with embedding and output, Moonlight without.
ACTIVE = {("qwen3_moe", "30B-A3B"): 3.3, ("qwen3_moe", "235B-A22B"): 22, ("deepseek_v3", "671B"): 37}

NAMES = ("qwen3", "qwen3_moe", "deepseek_v3")
QWEN3, MOE, DEEPSEEK = (registry.family(name).sizes["debug"] for name in NAMES)


@pytest.mark.parametrize(("model", "count"), PUBLISHED.items(), ids=str)
def test_arithmetic_gives_the_published_parameter_count(model: tuple[str, str], count: int) -> None:
    name, flavor = model
    assert registry.family(name).sizes[flavor].parameter_count() == count


@pytest.mark.parametrize(("model", "billions"), ACTIVE.items(), ids=str)
def test_a_token_uses_as_many_parameters_as_published(model: tuple[str, str], billions: float) -> None:
    name, flavor = model
    active = registry.family(name).sizes[flavor].active_parameter_count()
    assert active / 1e9 == pytest.approx(billions, rel=0.02)


def test_moonlight_without_embedding_and_output_is_as_published() -> None:
    """Table 4 of arXiv 2502.16982: 15.29 and 2.24 billion."""
    sizes = registry.family("deepseek_v3").sizes["16B"]
    ends = sizes.parameter_count("tok_embeddings") + sizes.parameter_count("output")
    assert round((sizes.parameter_count() - ends) / 1e9, 2) == 15.29
    assert round((sizes.active_parameter_count() - ends) / 1e9, 2) == 2.24


@pytest.mark.parametrize("name", NAMES)
def test_the_built_model_has_the_parameters_that_its_sizes_say(name: str) -> None:
    for flavor, sizes in registry.family(name).sizes.items():
        few = replace(sizes, n_layers=min(sizes.n_layers, 5))  # dense layers and others
        with torch.device("meta"):
            model = registry.family(name).build(few)
        shapes = {n: s for module in few.modules() for n, s in few.parameter_shapes(module).items()}
        assert {n: tuple(p.shape) for n, p in model.named_parameters()} == shapes, flavor


@pytest.mark.parametrize("name", NAMES)
def test_debug_models_are_for_a_laptop_and_fill_four_ranks_with_two_stages(name: str) -> None:
    sizes = registry.family(name).sizes["debug"]
    assert sizes.n_layers == 8
    assert sizes.vocab_size == 2048
    assert 5e6 < sizes.active_parameter_count() < 7e6


@pytest.mark.parametrize("name", NAMES)
def test_work_is_that_of_the_weights_a_token_uses_and_of_attention(name: str) -> None:
    sizes = registry.family(name).sizes["debug"]
    assert sum(sizes.flops_per_token(512, m) for m in sizes.modules()) == sizes.flops_per_token(512)
    matrices = sizes.active_parameter_count() - sizes.parameter_count("tok_embeddings")
    matrices -= sum(
        shape[0] for m in sizes.modules() for shape in sizes.parameter_shapes(m).values() if len(shape) == 1
    )
    values = sizes.v_head_dim if name == "deepseek_v3" else sizes.head_dim
    attention = 6 * sizes.n_layers * sizes.n_heads * (sizes.head_dim + values) * 512
    assert sizes.flops_per_token(512) == 6 * matrices + attention


def test_more_experts_cost_memory_and_the_router_but_no_more_work() -> None:
    more = replace(MOE, n_experts=2 * MOE.n_experts)
    router = MOE.n_layers * MOE.n_experts * MOE.dim
    assert more.active_parameter_count() - MOE.active_parameter_count() == router
    assert more.flops_per_token(512) - MOE.flops_per_token(512) == 6 * router
    assert more.parameter_count() > 1.8 * MOE.parameter_count() - MOE.vocab_size * MOE.dim * 2


@pytest.mark.parametrize(
    ("sizes", "change", "reason"),
    [
        (QWEN3, {"head_dim": 33}, "head_dim 33 is odd"),
        (QWEN3, {"n_kv_heads": 3}, "n_heads 8 is not divisible by n_kv_heads 3"),
        (QWEN3, {"ffn_hidden": 0}, "ffn_hidden must be at least 1, got 0"),
        (QWEN3, {"norm_type": "batchnorm"}, "norm_type must be one of rmsnorm"),
        (MOE, {"n_experts_per_token": 17}, "n_experts_per_token must be at least 1 and at most n_experts 16"),
        (MOE, {"n_experts": 0}, "n_experts must be at least 1"),
        (MOE, {"rope_theta": 0.0}, "rope_theta must be above 0"),
        (DEEPSEEK, {"qk_rope_head_dim": 15}, "qk_rope_head_dim 15 is odd"),
        (DEEPSEEK, {"n_expert_groups": 3}, "n_experts 16 is not divisible by n_expert_groups 3"),
        (DEEPSEEK, {"n_groups_per_token": 5}, "at most n_expert_groups 4, got 5"),
        (DEEPSEEK, {"n_expert_groups": 16}, "leaves 1 expert a group"),
        (DEEPSEEK, {"n_experts_per_token": 9}, "more than the 8 experts in n_groups_per_token 2"),
        (DEEPSEEK, {"q_lora_rank": -1}, "q_lora_rank must be at least 0"),
        (DEEPSEEK, {"route_scale": 0.0}, "route_scale must be above 0"),
    ],
)
def test_impossible_sizes_are_refused_with_the_reason(
    sizes: object, change: dict[str, object], reason: str
) -> None:
    with pytest.raises(SizesError, match=reason):
        replace(sizes, **change)  # type: ignore[type-var]


def test_overrides_of_the_scaling_are_those_of_the_family() -> None:
    stretched = apply_overrides(QWEN3, {"rope_scaling": {"factor": 4.0, "original_max_seq_len": 32768}})
    assert stretched.rope_scaling == YarnScaling(4.0, 32768)
    published = registry.family("deepseek_v3").sizes["671B"]
    assert apply_overrides(published, {"rope_scaling": False}).rope_scaling is None
    with pytest.raises(SizesError, match=r"rope_scaling\.low_freq_factor is not among beta_fast"):
        apply_overrides(QWEN3, {"rope_scaling": {"low_freq_factor": 1.0}})
