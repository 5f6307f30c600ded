"""Llama in Hugging Face's terms: `LlamaForCausalLM` of transformers, in which all of Llama 2 to 3.3 are published."""

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
    llama3_scaling,
    required,
    rope_config,
    rope_of,
    shapes_of,
)
from models.llama.sizes import LlamaSizes

MODEL_TYPES = ("llama",)


def sizes_of(config: Config) -> LlamaSizes:
    """The sizes that a `config.json` says. Raises UnsupportedConfig, or SizesError for impossible ones."""
    expect(config, {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False})
    dim, heads = required(config, "hidden_size"), required(config, "num_attention_heads")
    expect(config, {"head_dim": dim // heads})
    theta, scaling = rope_of(config)
    return LlamaSizes(
        dim=dim,
        n_layers=required(config, "num_hidden_layers"),
        n_heads=heads,
        n_kv_heads=config.get("num_key_value_heads") or heads,
        ffn_hidden=required(config, "intermediate_size"),
        vocab_size=required(config, "vocab_size"),
        max_seq_len=config.get("max_position_embeddings") or 2048,
        norm_eps=config.get("rms_norm_eps") or 1e-6,
        rope_theta=theta,
        rope_scaling=llama3_scaling(scaling),
        tie_embeddings=bool(config.get("tie_word_embeddings")),
    )


def config_of(sizes: LlamaSizes) -> dict[str, Any]:
    """The `config.json` of a model of these sizes. Raises UnsupportedConfig for what they do not have."""
    if sizes.sliding_window is not None:
        raise UnsupportedConfig(
            f"model.override.sliding_window = {sizes.sliding_window}; LlamaForCausalLM has no sliding window"
        )
    if sizes.norm_type != "rmsnorm":
        raise UnsupportedConfig(f"model.norm_type = {sizes.norm_type!r}; LlamaForCausalLM has rmsnorm only")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": sizes.dim,
        "num_hidden_layers": sizes.n_layers,
        "num_attention_heads": sizes.n_heads,
        "num_key_value_heads": sizes.n_kv_heads,
        "head_dim": sizes.head_dim,
        "intermediate_size": sizes.ffn_hidden,
        "vocab_size": sizes.vocab_size,
        "max_position_embeddings": sizes.max_seq_len,
        "rms_norm_eps": sizes.norm_eps,
        **rope_config(sizes.rope_theta, sizes.rope_scaling),
        "tie_word_embeddings": sizes.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }


def weights_of(sizes: LlamaSizes) -> tuple[Weight, ...]:
    """Every tensor of a model of these sizes, in the model's order."""
    rotated = {"attention.wq.weight": sizes.head_dim, "attention.wk.weight": sizes.head_dim}
    in_layer = {**ATTENTION_NAMES, **FEED_FORWARD_NAMES, **NORM_NAMES}
    names = Names(OUTER_NAMES, in_layer, head_dims=rotated)
    return tuple(names.weight(name, shape) for name, shape in shapes_of(sizes).items())


def is_left_out(sizes: LlamaSizes, name: str) -> bool:
    """Whether a tensor of theirs has no counterpart here although the files are of such a model."""
    return name.endswith(ROTARY_BUFFER)
