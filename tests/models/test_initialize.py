"""Initial parameters follow from the seed and the name alone, whatever the layout."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from models.initialize import full_name, initialize_parameters
from models.llama.model import Transformer
from models.llama.sizes import LlamaSizes
from tests.distributed.ranks import run_ranks

# Sizes that no number of ranks divides.
TINY = LlamaSizes(dim=36, n_layers=3, n_heads=6, n_kv_heads=3, ffn_hidden=51, vocab_size=61, max_seq_len=64)


def build(modules: tuple[str, ...] | None = None, seed: int = 7, sizes: LlamaSizes = TINY) -> Transformer:
    with torch.device("meta"):
        model = Transformer(sizes, modules)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, math.nan)  # nothing left over can pass for an initial value
    initialize_parameters(model, seed)
    return model


def digests(model: nn.Module) -> dict[str, str]:
    return {
        full_name(name): hashlib.sha256(p.detach().numpy().tobytes()).hexdigest()
        for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("stages", [1, 2, 3, 6])
def test_initial_parameters_do_not_depend_on_the_pipeline_split(stages: int) -> None:
    """Case P13."""
    names = TINY.modules()
    per_stage = len(names) // stages
    parts: dict[str, str] = {}
    for stage in range(stages):
        parts |= digests(build(names[stage * per_stage : (stage + 1) * per_stage]))
    assert parts == digests(build())


def _sharded(rank: int, shape: tuple[int, ...]) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    with torch.device("meta"):
        model = Transformer(TINY)
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    if rank == 1:
        torch.manual_seed(12345)  # a rank's own generator must not matter
    initialize_parameters(model, 7)
    full = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        full[name] = parameter.full_tensor().detach()
    return full


@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)], ids=["fsdp 2", "fsdp 4", "hsdp 2x2"])
def test_initial_parameters_do_not_depend_on_sharding(shape: tuple[int, ...]) -> None:
    plain = {name: p.detach().numpy() for name, p in build().named_parameters()}
    for full in run_ranks(_sharded, math.prod(shape), shape):
        assert full.keys() == plain.keys()
        assert all((full[name] == plain[name]).all() for name in plain)


def _sharded_without_a_peer(rank: int) -> bool:
    """Rank 0 alone initialises: this would hang if it communicated."""
    mesh = init_device_mesh("cpu", (2,))
    with torch.device("meta"):
        model = Transformer(TINY)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    if rank == 0:
        initialize_parameters(model, 7)
    dist.barrier()
    return True


def test_initialisation_does_not_communicate() -> None:
    assert run_ranks(_sharded_without_a_peer, 2, timeout=20.0) == [True, True]


def test_all_parameters_differ_from_each_other_and_between_seeds() -> None:
    weights = {name: digest for name, digest in digests(build()).items() if "norm" not in name}
    others = {name: digest for name, digest in digests(build(seed=8)).items() if "norm" not in name}
    every = [*weights.values(), *others.values()]
    assert len(every) == len(set(every))


def test_the_global_generator_is_neither_read_nor_moved() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = digests(build())
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert digests(build()) == first


def test_names_are_found_through_wrappers_of_the_layers_and_of_the_model() -> None:
    wrapped = Transformer(TINY)
    for name, layer in list(wrapped.layers.items()):
        wrapped.layers[name] = torch.compile(checkpoint_wrapper(layer), backend="eager")
    assert any("_orig_mod" in name for name, _ in wrapped.named_parameters())
    initialize_parameters(wrapped, 7)
    assert digests(wrapped) == digests(build())

    whole = Transformer(TINY)
    initialize_parameters(torch.compile(checkpoint_wrapper(whole), backend="eager"), 7)
    assert digests(whole) == digests(build())


def test_parameters_in_bf16_are_the_rounded_ones_of_fp32() -> None:
    rounded = Transformer(TINY).bfloat16()
    initialize_parameters(rounded, 7)
    for name, parameter in build().named_parameters():
        assert torch.equal(rounded.get_parameter(name), parameter.bfloat16())


@pytest.mark.parametrize("tied", [False, True])
def test_standard_deviations_are_those_of_the_rules(tied: bool) -> None:
    sizes = LlamaSizes(
        dim=256, n_layers=2, n_heads=8, n_kv_heads=4, ffn_hidden=512, vocab_size=1024, max_seq_len=64
    )
    weights = dict(build(sizes=replace(sizes, tie_embeddings=tied)).named_parameters())
    cut = 0.9866  # standard deviation of a normal cut off at three
    expected = {
        "layers.1.attention.wq": 0.02 * cut,
        "layers.1.feed_forward.w1": 0.02 * cut,
        "layers.0.attention.wo": 0.02 / math.sqrt(2) * cut,
        "layers.1.attention.wo": 0.02 / 2 * cut,
        "layers.1.feed_forward.w2": 0.02 / 2 * cut,
        "layers.1.feed_forward.w3": 0.02 / 2 * cut,
        **({"tok_embeddings": cut / 16} if tied else {"tok_embeddings": 1.0, "output": cut / 16}),
    }
    for name, std in expected.items():
        weight = weights[f"{name}.weight"]
        assert weight.std().item() == pytest.approx(std, rel=0.02)
        assert weight.mean().abs().item() < 0.02 * std
    assert weights["layers.1.attention.wq.weight"].abs().max() <= 0.06
    assert all((w == 1).all() for name, w in weights.items() if "norm" in name)


def test_a_module_without_rules_is_refused() -> None:
    with pytest.raises(TypeError, match="Linear has no rules"):
        initialize_parameters(nn.Linear(2, 2), 0)


def test_parameters_on_the_meta_device_are_refused() -> None:
    with torch.device("meta"):
        model = Transformer(TINY)
    with pytest.raises(ValueError, match=r"tok_embeddings\.weight is on the meta device"):
        initialize_parameters(model, 0)
