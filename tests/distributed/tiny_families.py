"""A tiny model of each family, for runs of the trainer: eight layers, so that 4 ranks can have 2 stages each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_ALL = {"dim": 32, "n_layers": 8, "n_heads": 4, "vocab_size": 258, "max_seq_len": 64}
_EXPERTS = {"expert_hidden": 16, "n_experts": 8, "n_experts_per_token": 2}

FAMILIES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "qwen3": {**_ALL, "n_kv_heads": 2, "head_dim": 12, "ffn_hidden": 48},
        "qwen3_moe": {**_ALL, "n_kv_heads": 2, "head_dim": 12, **_EXPERTS},
        "deepseek_v3": {
            **_ALL,
            "n_dense_layers": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 12,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
            "ffn_hidden": 48,
            **_EXPERTS,
            "n_expert_groups": 4,
            "n_groups_per_token": 2,
        },
    }
)


def model_table(family: str) -> dict[str, Any]:
    """The table [model] of the family's tiny model."""
    return {"name": family, "override": dict(FAMILIES[family])}
