"""Sizes and configurations: what is published is recognised, and every flavor survives the way there and back."""

from __future__ import annotations

from typing import Any

import pytest

from models import registry
from models.hf import UnsupportedConfig
from tests.weights.made import SIZES, form_of
from trainer.config.rules.model import sizes_of as configured
from trainer.weights.importing import configuration
from trainer.weights.naming import differences, hugging_face_format, name_of

FLAVORS = [(name, flavor) for name in registry.names() for flavor in registry.family(name).sizes]

# As their authors published them; what says nothing about the model is left out.
PUBLISHED: list[tuple[str, str, dict[str, Any]]] = [
    (
        *("llama2", "70B"),
        {
            "model_type": "llama",
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "max_position_embeddings": 4096,
            "num_attention_heads": 64,
            "num_hidden_layers": 80,
            "num_key_value_heads": 8,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "vocab_size": 32000,
        },
    ),
    (
        *("llama3.2", "1B"),
        {
            "model_type": "llama",
            "attention_bias": False,
            "mlp_bias": False,
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "num_attention_heads": 32,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "vocab_size": 128256,
        },
    ),
    (
        *("qwen3", "8B"),
        {
            "model_type": "qwen3",
            "attention_bias": False,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "max_position_embeddings": 40960,
            "max_window_layers": 36,
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
    ),
    (
        *("qwen3_moe", "30B-A3B"),
        {
            "model_type": "qwen3_moe",
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "max_position_embeddings": 40960,
            "mlp_only_layers": [],
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
    ),
    (
        *("deepseek_v3", "671B"),
        {
            "model_type": "deepseek_v3",
            "attention_bias": False,
            "first_k_dense_replace": 3,
            "hidden_act": "silu",
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "kv_lora_rank": 512,
            "max_position_embeddings": 163840,
            "moe_intermediate_size": 2048,
            "moe_layer_freq": 1,
            "n_group": 8,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_attention_heads": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 61,
            "num_key_value_heads": 128,
            "num_nextn_predict_layers": 1,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 40,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
                "type": "yarn",
            },
            "rope_theta": 10000,
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "tie_word_embeddings": False,
            "topk_group": 4,
            "topk_method": "noaux_tc",
            "v_head_dim": 128,
            "vocab_size": 129280,
        },
    ),
]


@pytest.mark.parametrize(("name", "flavor", "config"), PUBLISHED, ids=[case[0] for case in PUBLISHED])
def test_a_published_configuration_is_the_flavor_of_that_name(
    name: str, flavor: str, config: dict[str, Any]
) -> None:
    form = hugging_face_format(registry.family(name))
    assert form is not None
    sizes = form.sizes_of(config)
    assert differences(sizes, registry.family(name).sizes[flavor]) == ""
    assert not name_of(sizes).override


@pytest.mark.parametrize(("name", "flavor"), FLAVORS)
def test_every_flavor_comes_back_from_its_configuration_and_its_names_are_unique(
    name: str, flavor: str
) -> None:
    family = registry.family(name)
    sizes, form = family.sizes[flavor], hugging_face_format(family)
    assert form is not None
    assert form.sizes_of(form.config_of(sizes)) == sizes
    weights = form.weights_of(sizes)
    expected = {n for module in sizes.modules() for n in sizes.parameter_shapes(module)}
    assert {weight.name for weight in weights} >= expected
    theirs = [each for weight in weights for each in weight.theirs]
    assert len(set(theirs)) == len(theirs)


@pytest.mark.parametrize("kind", SIZES)
def test_the_configuration_of_an_imported_model_means_exactly_its_sizes(kind: str) -> None:
    assert configured(configuration(name_of(SIZES[kind]))) == SIZES[kind]


@pytest.mark.parametrize(
    ("kind", "changed", "reason"),
    [
        ("llama", {"mlp_bias": True}, "mlp_bias = True"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window = True"),
        ("qwen3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_type = 'linear'"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob is not true"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\]"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave = False"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method = 'greedy'"),
        ("deepseek_v3", {"n_routed_experts": None}, "n_routed_experts is missing"),
    ],
)
def test_a_configuration_of_another_architecture_is_refused_with_key_and_value(
    kind: str, changed: dict[str, Any], reason: str
) -> None:
    form = form_of(SIZES[kind])
    with pytest.raises(UnsupportedConfig, match=reason):
        form.sizes_of({**form.config_of(SIZES[kind]), **changed})
