"""Qwen3's mixture of experts in Hugging Face's terms: `Qwen3MoeForCausalLM` of transformers."""

from __future__ import annotations

from typing import Any

from models.hf import (
    ATTENTION_NAMES,
    EXPERT_NAMES,
    NORM_NAMES,
    OUTER_NAMES,
    ROTARY_BUFFER,
    Config,
    Names,
    UnsupportedConfig,
    Weight,
    expect,
    required,
    shapes_of,
)
from models.qwen3.hf import HEAD_NORM_NAMES, ROTATED, attention_config_of, attention_sizes_of
from models.qwen3_moe.sizes import Qwen3MoESizes

MODEL_TYPES = ("qwen3_moe",)


def sizes_of(config: Config) -> Qwen3MoESizes:
    """The sizes that a `config.json` says. Raises UnsupportedConfig, or SizesError for impossible ones."""
    expect(config, {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False})
    expect(config, {"decoder_sparse_step": 1, "mlp_only_layers": []})
    if config.get("norm_topk_prob") is not True:  # their default is false
        raise UnsupportedConfig("norm_topk_prob is not true; Stageline's router divides weights by their sum")
    experts = config.get("num_experts")
    return Qwen3MoESizes(
        expert_hidden=required(config, "moe_intermediate_size"),
        n_experts=required(config, "num_local_experts") if experts is None else experts,
        n_experts_per_token=required(config, "num_experts_per_tok"),
        **attention_sizes_of(config),
    )


def config_of(sizes: Qwen3MoESizes) -> dict[str, Any]:
    """The `config.json` of a model of these sizes. Raises UnsupportedConfig for a norm that they do not have."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": sizes.expert_hidden,
        "num_experts": sizes.n_experts,
        "num_experts_per_tok": sizes.n_experts_per_token,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        **attention_config_of(sizes),
    }


def weights_of(sizes: Qwen3MoESizes) -> tuple[Weight, ...]:
    """Every tensor of a model of these sizes, in the model's order."""
    router = {"moe.router.gate.weight": "mlp.gate.weight"}
    in_layer = {**ATTENTION_NAMES, **HEAD_NORM_NAMES, **router, **NORM_NAMES}
    names = Names(OUTER_NAMES, in_layer, EXPERT_NAMES, dict.fromkeys(ROTATED, sizes.head_dim))
    return tuple(names.weight(name, shape) for name, shape in shapes_of(sizes).items())


def is_left_out(sizes: Qwen3MoESizes, name: str) -> bool:
    """Whether a tensor of theirs has no counterpart here although the files are of such a model."""
    return name.endswith(ROTARY_BUFFER)
