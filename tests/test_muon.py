"""Muon: orthogonal updates of the hidden matrices, AdamW for the rest, the same in every layout; reduced moments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from models.registry import family
from tests.test_optimizer import CPU, Biased, optimizer_table
from trainer.checkpoint.state import allocate_optimizer_state, optimizer_tensors
from trainer.optimizer import build_optimizer, trainable_parameters
from trainer.orthogonal import orthogonalized, scale


def matrices(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def stage() -> nn.Module:
    """A layer with a matrix, stacked experts and vectors, and an embedding."""
    model = nn.Module()
    model.tok_embeddings = nn.Embedding(7, 3)
    model.layers = nn.ModuleDict({"0": Biased()})
    return model


def give_gradients(model: nn.Module) -> None:
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)


@pytest.mark.parametrize("shape", [(6, 40), (40, 6), (3, 17, 12)])
def test_all_singular_values_come_near_to_one(shape: tuple[int, ...]) -> None:
    values = torch.linalg.svdvals(orthogonalized(matrices(*shape)))
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_each_matrix_of_a_stack_is_orthogonalised_by_itself() -> None:
    stack = matrices(4, 6, 5) * torch.tensor([1.0, 10.0, 0.1, 0.0]).view(-1, 1, 1)
    for together, alone in zip(orthogonalized(stack), stack, strict=True):
        torch.testing.assert_close(together, orthogonalized(alone))
    assert not orthogonalized(stack)[3].any(), "zeros stay zeros"


@pytest.mark.parametrize("kind", ["match_rms_adamw", "original"])
def test_the_update_is_that_of_torch(kind: str) -> None:
    ours, theirs = stage(), stage()
    theirs.load_state_dict(ours.state_dict())
    table = optimizer_table(name="Muon", muon_scale=kind, lr=0.02)
    optimizer = build_optimizer([ours], table, CPU)
    expected = torch.optim.Muon(
        [theirs.layers["0"].linear.weight],
        lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn=kind,
    )  # fmt: skip
    for _ in range(3):
        give_gradients(ours), give_gradients(theirs)
        optimizer.step(), expected.step()
    updated = ours.layers["0"].linear.weight
    # torch iterates in bfloat16.
    torch.testing.assert_close(updated, theirs.layers["0"].linear.weight, rtol=0.03, atol=2e-3)


def test_matrices_of_layers_are_muons_and_the_rest_is_adamws() -> None:
    model = stage()
    optimizer = build_optimizer([model], optimizer_table(name="Muon"), CPU)
    allocate_optimizer_state(optimizer)
    quantities: dict[str, set[str]] = {}
    for name in optimizer_tensors([model], optimizer):
        parameter, _, quantity = name.rpartition(".")
        quantities.setdefault(parameter, set()).add(quantity)
    hidden = {"layers.0.linear.weight", "layers.0.experts.weight"}
    assert {name for name, kept in quantities.items() if kept == {"momentum_buffer"}} == hidden
    assert all(quantities[n] == {"step", "exp_avg", "exp_avg_sq"} for n in quantities if n not in hidden)
    assert quantities.keys() == {name for name, _ in trainable_parameters([model])}
    assert [group["name"] for group in optimizer.param_groups] == ["hidden", "decay", "no_decay"]


def test_of_a_llama_model_all_matrices_but_embedding_and_output_are_hidden() -> None:
    llama = family("llama3")
    with torch.device("meta"):
        model = llama.build(llama.sizes["debug"])
    optimizer = build_optimizer([model], optimizer_table(name="Muon", fused=False), CPU)
    names = {id(parameter): name for name, parameter in trainable_parameters([model])}
    decayed = {names[id(parameter)] for parameter in optimizer.param_groups[1]["params"]}
    assert decayed == {"tok_embeddings.weight", "output.weight"}
    assert len(optimizer.param_groups[0]["params"]) == 7 * 8


@pytest.mark.parametrize("name", ["AdamW", "Adam", "Muon"])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_making_the_state_leaves_the_parameters(name: str, state_dtype: str) -> None:
    model = stage()
    optimizer = build_optimizer([model], optimizer_table(name=name, state_dtype=state_dtype), CPU)
    before = [parameter.clone() for parameter in model.parameters()]
    allocate_optimizer_state(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    rates = {group["lr"] for group in optimizer.param_groups}
    assert rates == {0.5}


@pytest.mark.parametrize("name", ["AdamW", "Adam", "Muon"])
@pytest.mark.parametrize("fused", [None, False])
def test_reduced_moments_are_in_bfloat16_and_the_update_is_nearly_the_same(
    name: str, fused: bool | None
) -> None:
    models = [stage(), stage()]
    models[1].load_state_dict(models[0].state_dict())
    changed: dict[str, Any] = {"name": name, "fused": fused, "lr": 1e-2}
    for model, state_dtype in zip(models, ("float32", "bfloat16"), strict=True):
        optimizer = build_optimizer([model], optimizer_table(state_dtype=state_dtype, **changed), CPU)
        for _ in range(5):
            give_gradients(model)
            optimizer.step()
        kept = {n: t.dtype for n, t in optimizer_tensors([model], optimizer).items() if t.ndim}
        assert set(kept.values()) == {getattr(torch, state_dtype)}
    for wide, reduced in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(reduced, wide, rtol=2e-2, atol=1e-3)


def test_the_scale_gives_the_root_mean_square_of_adamw() -> None:
    update = orthogonalized(matrices(64, 256)) * scale(64, 256, "match_rms_adamw")
    assert float(update.square().mean().sqrt()) == pytest.approx(0.2, rel=0.15)
