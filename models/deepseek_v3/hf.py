"""DeepSeek-V3 in Hugging Face's terms: `DeepseekV3ForCausalLM` of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from models.deepseek_v3.sizes import DeepSeekV3Sizes
from models.hf import (
    EXPERT_NAMES,
    FEED_FORWARD_NAMES,
    NORM_NAMES,
    OUTER_NAMES,
    ROTARY_BUFFER,
    Config,
    Names,
    UnsupportedConfig,
    Weight,
    expect,
    required,
    rope_config,
    rope_of,
    yarn_scaling,
)

MODEL_TYPES = ("deepseek_v3",)

_BIAS = "moe.router.expert_bias"

# Features that turn are in the order of neighbouring pairs there too ("rope_interleave"), so no row changes place.
_IN_LAYER = {
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wq_a.weight": "self_attn.q_a_proj.weight",
    "attention.q_norm.weight": "self_attn.q_a_layernorm.weight",
    "attention.wq_b.weight": "self_attn.q_b_proj.weight",
    "attention.wkv_a.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attention.kv_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attention.wkv_b.weight": "self_attn.kv_b_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    **FEED_FORWARD_NAMES,
    "moe.router.gate.weight": "mlp.gate.weight",
    _BIAS: "mlp.gate.e_score_correction_bias",
    "moe.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "moe.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
    "moe.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
    **NORM_NAMES,
}


def sizes_of(config: Config) -> DeepSeekV3Sizes:
    """The sizes that a `config.json` says. Raises UnsupportedConfig, or SizesError for impossible ones."""
    expect(config, {"hidden_act": "silu", "attention_bias": False, "rope_interleave": True})
    expect(config, {"norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc"})
    expect(config, {"moe_layer_freq": 1, "num_key_value_heads": required(config, "num_attention_heads")})
    theta, scaling = rope_of(config)
    max_seq_len = config.get("max_position_embeddings") or 4096
    return DeepSeekV3Sizes(
        dim=required(config, "hidden_size"),
        n_layers=required(config, "num_hidden_layers"),
        n_dense_layers=required(config, "first_k_dense_replace"),
        n_heads=required(config, "num_attention_heads"),
        q_lora_rank=config.get("q_lora_rank") or 0,
        kv_lora_rank=required(config, "kv_lora_rank"),
        qk_nope_head_dim=required(config, "qk_nope_head_dim"),
        qk_rope_head_dim=required(config, "qk_rope_head_dim"),
        v_head_dim=required(config, "v_head_dim"),
        ffn_hidden=required(config, "intermediate_size"),
        expert_hidden=required(config, "moe_intermediate_size"),
        n_experts=required(config, "n_routed_experts"),
        n_experts_per_token=required(config, "num_experts_per_tok"),
        n_shared_experts=required(config, "n_shared_experts"),
        n_expert_groups=required(config, "n_group"),
        n_groups_per_token=required(config, "topk_group"),
        route_scale=float(required(config, "routed_scaling_factor")),
        vocab_size=required(config, "vocab_size"),
        max_seq_len=max_seq_len,
        norm_eps=config.get("rms_norm_eps") or 1e-6,
        rope_theta=theta,
        rope_scaling=yarn_scaling(scaling, max_seq_len),
        tie_embeddings=bool(config.get("tie_word_embeddings")),
    )


def config_of(sizes: DeepSeekV3Sizes) -> dict[str, Any]:
    """The `config.json` of a model of these sizes. Raises UnsupportedConfig for a model that they do not have."""
    if sizes.norm_type != "rmsnorm":
        raise UnsupportedConfig(
            f"model.norm_type = {sizes.norm_type!r}; DeepseekV3ForCausalLM has rmsnorm only"
        )
    if not sizes.n_shared_experts:
        raise UnsupportedConfig("n_shared_experts = 0; DeepseekV3ForCausalLM has at least one")
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": sizes.dim,
        "num_hidden_layers": sizes.n_layers,
        "first_k_dense_replace": sizes.n_dense_layers,
        "num_attention_heads": sizes.n_heads,
        "num_key_value_heads": sizes.n_heads,
        "q_lora_rank": sizes.q_lora_rank or None,
        "kv_lora_rank": sizes.kv_lora_rank,
        "qk_nope_head_dim": sizes.qk_nope_head_dim,
        "qk_rope_head_dim": sizes.qk_rope_head_dim,
        "v_head_dim": sizes.v_head_dim,
        "intermediate_size": sizes.ffn_hidden,
        "moe_intermediate_size": sizes.expert_hidden,
        "moe_layer_freq": 1,
        "n_routed_experts": sizes.n_experts,
        "num_experts_per_tok": sizes.n_experts_per_token,
        "n_shared_experts": sizes.n_shared_experts,
        "n_group": sizes.n_expert_groups,
        "topk_group": sizes.n_groups_per_token,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": sizes.route_scale,
        "vocab_size": sizes.vocab_size,
        "max_position_embeddings": sizes.max_seq_len,
        "rms_norm_eps": sizes.norm_eps,
        **rope_config(sizes.rope_theta, sizes.rope_scaling),
        "rope_interleave": True,
        "tie_word_embeddings": sizes.tie_embeddings,
        "num_nextn_predict_layers": 0,
        "hidden_act": "silu",
        "attention_bias": False,
    }


def weights_of(sizes: DeepSeekV3Sizes) -> tuple[Weight, ...]:
    """Every tensor of a model of these sizes, in the model's order; the bias of each router is among them."""
    names = Names(OUTER_NAMES, _IN_LAYER, EXPERT_NAMES, full_precision=frozenset({_BIAS}))
    return tuple(names.weight(name, shape) for name, shape in _shapes(sizes))


def is_left_out(sizes: DeepSeekV3Sizes, name: str) -> bool:
    """Whether a tensor of theirs has no counterpart here although the files are of such a model.

    The layers after the last one are those that predict several tokens, which the model here does not have.
    """
    parts = name.split(".")
    beyond = parts[:2] == ["model", "layers"] and parts[2].isdecimal() and int(parts[2]) >= sizes.n_layers
    return beyond or name.endswith(ROTARY_BUFFER)


def _shapes(sizes: DeepSeekV3Sizes) -> Iterator[tuple[str, tuple[int, ...]]]:
    for module in sizes.modules():
        for name, shape in sizes.parameter_shapes(module).items():
            yield name, shape
            if name.endswith("moe.router.gate.weight"):
                yield f"{module}.{_BIAS}", (sizes.n_experts,)
