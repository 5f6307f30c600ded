"""Tiny models of every family, and folders in Hugging Face's form made of them without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from models.deepseek_v3.sizes import DeepSeekV3Sizes
from models.hf import Weight
from models.llama.sizes import LlamaSizes
from models.qwen3.sizes import Qwen3Sizes
from models.qwen3_moe.sizes import Qwen3MoESizes
from models.registry import family
from models.sizes import RopeScaling, YarnScaling
from trainer.weights.change import to_theirs
from trainer.weights.naming import hugging_face_format, name_of

_LLAMA = LlamaSizes(
    dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_hidden=48, vocab_size=258, max_seq_len=64
)
_ATTENTION = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 12, "vocab_size": 258}

SIZES: Mapping[str, Any] = MappingProxyType(
    {
        "llama": replace(_LLAMA, rope_scaling=RopeScaling(original_max_seq_len=16)),
        "llama tied": replace(_LLAMA, n_kv_heads=4, tie_embeddings=True),
        "qwen3": Qwen3Sizes(
            **_ATTENTION, ffn_hidden=48, max_seq_len=64, rope_scaling=YarnScaling(original_max_seq_len=16)
        ),
        "qwen3_moe": Qwen3MoESizes(
            **_ATTENTION, expert_hidden=16, n_experts=4, n_experts_per_token=2, max_seq_len=64
        ),
        "deepseek_v3": DeepSeekV3Sizes(
            dim=32,
            n_layers=2,
            n_dense_layers=1,
            n_heads=4,
            q_lora_rank=12,
            kv_lora_rank=20,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=12,
            ffn_hidden=48,
            expert_hidden=16,
            n_experts=8,
            n_experts_per_token=2,
            n_shared_experts=2,
            n_expert_groups=4,
            n_groups_per_token=2,
            route_scale=2.5,
            vocab_size=258,
            max_seq_len=64,
            rope_scaling=YarnScaling(factor=40.0, original_max_seq_len=16, mscale_all_dim=1.0),
        ),
    }
)


def form_of(sizes: Any) -> Any:
    """The module `hf` of the family with these sizes."""
    return hugging_face_format(family(name_of(sizes).name))


def model_of(sizes: Any, seed: int = 0) -> nn.Module:
    """A model whose every number is random, norms and biases too."""
    model = family(name_of(sizes).name).build(sizes)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.normal_(1.0 if tensor.ndim == 1 else 0.0, 0.1, generator=generator)
    return model


def their_tensors(sizes: Any, model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """A model's tensors by Hugging Face's names."""
    ours = model.state_dict()
    weights: tuple[Weight, ...] = form_of(sizes).weights_of(sizes)
    return {
        name: tensor.to(torch.float32 if weight.full_precision else dtype).contiguous()
        for weight in weights
        for name, tensor in zip(weight.theirs, to_theirs(weight, ours[weight.name]), strict=True)
    }


def hugging_face_folder(
    path: Path, sizes: Any, dtype: torch.dtype = torch.float32, files: int = 1, seed: int = 0
) -> nn.Module:
    """Write such a folder, its tensors dealt out to `files` files; returns the model that they are of."""
    path.mkdir(parents=True, exist_ok=True)
    model = model_of(sizes, seed)
    tensors = their_tensors(sizes, model, dtype)
    (path / "config.json").write_text(json.dumps(form_of(sizes).config_of(sizes)))
    if files == 1:
        save_file(tensors, path / "model.safetensors")
        return model
    placed = {name: f"model-{i % files + 1:05}-of-{files:05}.safetensors" for i, name in enumerate(tensors)}
    for file in set(placed.values()):
        save_file({name: tensors[name] for name in placed if placed[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return model
