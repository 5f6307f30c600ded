"""Qwen3 in Hugging Face's terms: `Qwen3ForCausalLM` of transformers."""

from __future__ import annotations

from typing import Any

from models.hf import (
    ATTENTION_NAMES,
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
    shapes_of,
    yarn_scaling,
)
from models.qwen3.sizes import Qwen3Sizes

MODEL_TYPES = ("qwen3",)

# The norms of queries and keys are over the features of a head, which are in the order of the rows of wq and wk.
HEAD_NORM_NAMES = {
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
}
ROTATED = ("attention.wq.weight", "attention.wk.weight", *HEAD_NORM_NAMES)


def sizes_of(config: Config) -> Qwen3Sizes:
    """The sizes that a `config.json` says. Raises UnsupportedConfig, or SizesError for impossible ones."""
    expect(config, {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False})
    return Qwen3Sizes(ffn_hidden=required(config, "intermediate_size"), **attention_sizes_of(config))


def attention_sizes_of(config: Config) -> dict[str, Any]:
    """The sizes that dense and mixture-of-experts models have in common."""
    theta, scaling = rope_of(config)
    max_seq_len = config.get("max_position_embeddings") or 32768
    return {
        "dim": required(config, "hidden_size"),
        "n_layers": required(config, "num_hidden_layers"),
        "n_heads": required(config, "num_attention_heads"),
        "n_kv_heads": config.get("num_key_value_heads") or required(config, "num_attention_heads"),
        "head_dim": config.get("head_dim") or 128,
        "vocab_size": required(config, "vocab_size"),
        "max_seq_len": max_seq_len,
        "norm_eps": config.get("rms_norm_eps") or 1e-6,
        "rope_theta": theta,
        "rope_scaling": yarn_scaling(scaling, max_seq_len),
        "tie_embeddings": bool(config.get("tie_word_embeddings")),
    }


def config_of(sizes: Qwen3Sizes) -> dict[str, Any]:
    """The `config.json` of a model of these sizes. Raises UnsupportedConfig for a norm that they do not have."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "intermediate_size": sizes.ffn_hidden,
        **attention_config_of(sizes),
    }


def attention_config_of(sizes: Any) -> dict[str, Any]:
    """What dense and mixture-of-experts models have in common. Raises UnsupportedConfig."""
    if sizes.norm_type != "rmsnorm":
        raise UnsupportedConfig(f"model.norm_type = {sizes.norm_type!r}; Qwen3ForCausalLM has rmsnorm only")
    return {
        "hidden_size": sizes.dim,
        "num_hidden_layers": sizes.n_layers,
        "num_attention_heads": sizes.n_heads,
        "num_key_value_heads": sizes.n_kv_heads,
        "head_dim": sizes.head_dim,
        "vocab_size": sizes.vocab_size,
        "max_position_embeddings": sizes.max_seq_len,
        "rms_norm_eps": sizes.norm_eps,
        **rope_config(sizes.rope_theta, sizes.rope_scaling),
        "tie_word_embeddings": sizes.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
    }


def weights_of(sizes: Qwen3Sizes) -> tuple[Weight, ...]:
    """Every tensor of a model of these sizes, in the model's order."""
    in_layer = {**ATTENTION_NAMES, **HEAD_NORM_NAMES, **FEED_FORWARD_NAMES, **NORM_NAMES}
    names = Names(OUTER_NAMES, in_layer, head_dims=dict.fromkeys(ROTATED, sizes.head_dim))
    return tuple(names.weight(name, shape) for name, shape in shapes_of(sizes).items())


def is_left_out(sizes: Qwen3Sizes, name: str) -> bool:
    """Whether a tensor of theirs has no counterpart here although the files are of such a model."""
    return name.endswith(ROTARY_BUFFER)
