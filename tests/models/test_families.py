"""The models of Qwen3 and DeepSeek-V3: the cache, packing, initial values, and learning."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from models.initialize import Normal, Stacked, initialize_parameters
from models.layers.decoder import Decoder
from models.layers.sequences import Sequences
from models.registry import family
from tests.distributed.ranks import run_ranks
from tests.distributed.tiny_families import FAMILIES

NAMES = tuple(FAMILIES)


def build(name: str, modules: tuple[str, ...] | None = None, **changes: Any) -> Decoder:
    sizes = replace(family(name).sizes["debug"], **{**FAMILIES[name], **changes})
    with torch.device("meta"):
        model = family(name).build(sizes, modules)
    model.to_empty(device="cpu")
    initialize_parameters(model, 5)
    return model


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_generation_with_the_cache_equals_generation_without(name: str) -> None:
    """Token by token, and in pieces of several tokens; DeepSeek-V3 keeps latent vectors only."""
    model = build(name)
    tokens = torch.randint(258, (2, 12))
    whole = model(tokens)
    for pieces in ([5, *[1] * 7], [3, 4, 5], [12]):
        cache = model.new_cache(2, 12)
        parts = [model(piece, cache=cache) for piece in tokens.split(pieces, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-4)


def test_the_cache_of_latent_attention_holds_one_small_vector_for_each_token() -> None:
    model = build("deepseek_v3")
    kept = next(iter(model.new_cache(1, 10).layers.values()))
    assert kept.keys.shape == (1, 1, 10, 12)
    assert kept.values.shape == (1, 1, 10, 4)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_packed_documents_are_computed_as_if_each_were_alone(name: str) -> None:
    model = build(name)
    tokens = torch.randint(258, (1, 14))
    packed = model(tokens, Sequences.packed(torch.tensor([[0] * 5 + [1] * 9])))
    alone = torch.cat([model(tokens[:, :5]), model(tokens[:, 5:])], dim=1)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)


def test_heads_need_not_be_as_wide_as_the_hidden_state_is_for_each() -> None:
    model = build("qwen3")
    assert model.layers["0"].attention.wq.weight.shape == (4 * 12, 32)


@torch.no_grad()
def test_queries_and_keys_are_normalised_over_each_head_before_they_are_turned() -> None:
    """So the scale of wq does not matter."""
    model = build("qwen3")
    tokens = torch.randint(258, (1, 9))
    before = model(tokens)
    for layer in model.layers.values():
        layer.attention.wq.weight *= 7.0
    torch.testing.assert_close(model(tokens), before, rtol=1e-3, atol=1e-4)


def test_the_first_layers_of_deepseek_v3_are_dense() -> None:
    model = build("deepseek_v3", n_dense_layers=3)
    dense = [layer.moe is None for layer in model.layers.values()]
    assert dense == [True] * 3 + [False] * 5


@pytest.mark.parametrize("name", NAMES)
def test_a_model_learns_a_short_text(name: str) -> None:
    torch.manual_seed(0)
    model = build(name, n_layers=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    text = torch.arange(24).repeat(2, 1) % 7
    losses = []
    for _ in range(25):
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.3 * losses[0]


# Initial values


def digests(model: nn.Module) -> dict[str, str]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {n: hashlib.sha256(t.detach().contiguous().numpy().tobytes()).hexdigest() for n, t in tensors}


@pytest.mark.parametrize("name", NAMES)
def test_initial_values_do_not_depend_on_the_pipeline_split(name: str) -> None:
    whole = build(name)
    names = whole.sizes.modules()
    parts = digests(build(name, names[:4])) | digests(build(name, names[4:]))
    assert parts == digests(whole)


def test_experts_differ_from_each_other_and_start_as_wide_as_a_matrix_alone() -> None:
    model = build("deepseek_v3", dim=64, expert_hidden=128)
    w1 = model.layers["1"].moe.experts.w1
    assert len({expert.sum().item() for expert in w1}) == len(w1)
    assert w1.std().item() == pytest.approx(0.02 * 0.9866, rel=0.02)
    assert model.initial("layers.1.moe.experts.w2") == Stacked(Normal(0.02 / 2, cutoff=3.0))
    assert model.initial("layers.1.moe.shared_experts.w2.weight") == Normal(0.02 / 2, cutoff=3.0)


def test_biases_and_counts_start_at_zero_and_only_biases_are_saved() -> None:
    model = build("deepseek_v3")
    router = model.layers["1"].moe.router
    assert router.expert_bias is not None
    assert router.expert_bias.dtype == torch.float32
    assert not router.expert_bias.any()
    assert not router.tokens_per_expert.any()
    router_names = {name for name in model.state_dict() if name.startswith("layers.1.moe.router.")}
    assert router_names == {"layers.1.moe.router.gate.weight", "layers.1.moe.router.expert_bias"}


def _sharded(_rank: int, by_experts: bool) -> dict[str, Tensor]:
    sizes = replace(
        family("qwen3_moe").sizes["debug"], **{**FAMILIES["qwen3_moe"], "n_experts": 7, "n_layers": 1}
    )
    with torch.device("meta"):
        model = family("qwen3_moe").build(sizes)
    if by_experts:  # each rank some experts, and of these a part of each
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "tensor"))
        experts = model.layers["0"].moe.experts
        for name, parameter in list(experts.named_parameters()):
            cut = distribute_tensor(parameter.detach(), mesh, [Shard(0), Shard(2)], src_data_rank=None)
            setattr(experts, name, nn.Parameter(cut))
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    model.to_empty(device="cpu")
    initialize_parameters(model, 5)
    return {
        name: p.full_tensor().detach() if isinstance(p, DTensor) else p.detach()
        for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("by_experts", [False, True], ids=["fsdp 4", "experts 2 x tensor 2"])
def test_initial_experts_do_not_depend_on_sharding(by_experts: bool) -> None:
    """Seven experts on two or four ranks, none of which divides them."""
    plain = dict(build("qwen3_moe", n_experts=7, n_layers=1).named_parameters())
    for full in run_ranks(_sharded, 4, by_experts):
        assert full.keys() == plain.keys()
        for name, value in plain.items():
            assert (torch.as_tensor(full[name]) == value).all(), name
