"""The optimizer's groups, the learning rate of every step, and both after a resume (cases L7, C2)."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo  # imported lazily by optimizers, for seconds; forked ranks inherit it from here
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from models.registry import family
from tests.distributed.ranks import run_ranks
from trainer.errors import ConfigurationError
from trainer.lr_schedule import LearningRateShape, lr_factor
from trainer.optimizer import build_lr_schedule, build_optimizer, is_decayed, trainable_parameters

CPU = torch.device("cpu")


def optimizer_table(**changed: Any) -> Any:
    defaults = {
        "name": "AdamW",
        "lr": 0.5,
        "betas": [0.9, 0.95],
        "eps": 1e-8,
        "weight_decay": 0.1,
        "fused": None,
        "state_dtype": "float32",
        "muon_momentum": 0.95,
        "muon_scale": "match_rms_adamw",
    }
    return SimpleNamespace(**{**defaults, **changed})


def config(**training: Any) -> Any:
    return SimpleNamespace(
        optimizer=optimizer_table(),
        lr_scheduler=SimpleNamespace(decay_ratio=None, decay_type="linear", min_lr_factor=0.0),
        training=SimpleNamespace(**{"steps": 10, "warmup_steps": 2, **training}),
    )


class Biased(nn.Module):
    """A linear layer with bias, a norm, and biases of 4 experts stacked into a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.ffn_norm = nn.LayerNorm(2)
        self.experts = nn.ParameterDict({"weight": torch.zeros(4, 2, 3), "bias": torch.zeros(4, 2)})


def groups_by_name(parts: list[nn.Module], **changed: Any) -> dict[str, set[str]]:
    """Which names are in the group of which weight decay."""
    optimizer = build_optimizer(parts, optimizer_table(**changed), CPU)
    names = {id(parameter): name for name, parameter in trainable_parameters(parts)}
    return {
        str(group["weight_decay"]): {names[id(parameter)] for parameter in group["params"]}
        for group in optimizer.param_groups
    }


def test_matrices_are_decayed_and_norms_and_biases_are_not() -> None:
    assert groups_by_name([Biased()]) == {
        "0.1": {"linear.weight", "experts.weight"},
        "0.0": {"linear.bias", "ffn_norm.weight", "ffn_norm.bias", "experts.bias"},
    }


def test_of_a_llama_model_every_matrix_is_decayed_and_every_norm_is_not() -> None:
    """Case L7: weight decay applied to norms and biases."""
    llama = family("llama3")
    with torch.device("meta"):
        groups = groups_by_name([llama.build(llama.sizes["debug"])], fused=False)
    assert {name.split(".")[-2] for name in groups["0.0"]} == {"attention_norm", "ffn_norm", "norm"}
    assert not any("norm" in name for name in groups["0.1"])
    assert {"tok_embeddings.weight", "output.weight"} <= groups["0.1"]


def test_stages_of_a_pipeline_share_one_optimizer_and_wrapped_layers_keep_their_names() -> None:
    first, second = nn.Module(), nn.Module()
    first.layers = nn.ModuleDict({"0": checkpoint_wrapper(Biased())})
    second.layers = nn.ModuleDict({"1": Biased()})
    groups = groups_by_name([first, second])
    assert {"layers.0.linear.weight", "layers.1.linear.weight"} < groups["0.1"]
    assert {"layers.0.ffn_norm.weight", "layers.1.linear.bias"} < groups["0.0"]


def test_frozen_parameters_are_left_out_and_an_empty_group_too() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    assert groups_by_name([model]) == {"0.1": {"weight"}}


def test_a_norm_stays_when_its_gradient_is_zero_and_a_matrix_shrinks() -> None:
    model = Biased()
    optimizer = build_optimizer([model], optimizer_table(), CPU)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 1 - 0.5 * 0.1 if is_decayed(name, parameter) else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
@pytest.mark.parametrize(("fused", "expected"), [(None, True), (True, True), (False, None)])
def test_the_optimizer_is_the_configured_one_and_fused_where_the_device_has_it(
    name: str, fused: bool | None, expected: bool | None
) -> None:
    optimizer = build_optimizer([nn.Linear(2, 2)], optimizer_table(name=name, fused=fused), CPU)
    assert type(optimizer).__name__ == name
    assert optimizer.defaults["fused"] is expected
    assert optimizer.defaults["betas"] == (0.9, 0.95)


def test_fused_on_a_device_without_it_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"optimizer\.fused = true: .*'meta'"):
        build_optimizer([nn.Linear(2, 2)], optimizer_table(fused=True), torch.device("meta"))


def sharded_update(_rank: int, fused: bool) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = build_optimizer([model], optimizer_table(fused=fused), CPU)
    for step in range(3):
        model(torch.full((2, 3), step + 1.0)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.full_tensor().detach() for parameter in model.parameters()]


def test_the_fused_update_of_sharded_parameters_equals_the_other_one() -> None:
    fused, foreach = (run_ranks(sharded_update, 2, fused)[0] for fused in (True, False))
    for one, other in zip(fused, foreach, strict=True):
        torch.testing.assert_close(torch.from_numpy(one), torch.from_numpy(other))


# The learning rate

shapes = st.builds(
    LearningRateShape,
    steps=st.integers(1, 200),
    warmup_steps=st.integers(0, 220),
    decay_ratio=st.none() | st.floats(0, 1),
    decay_type=st.sampled_from(["linear", "sqrt", "cosine"]),
    min_factor=st.floats(0, 1),
)


@given(shapes)
def test_the_rate_rises_stays_and_falls_and_keeps_between_its_bounds(shape: LearningRateShape) -> None:
    factors = [lr_factor(step, shape) for step in range(1, shape.steps + 50)]
    peak = min(shape.warmup_steps, len(factors))
    assert all(0 <= factor <= 1 for factor in factors)
    assert factors[:peak] == sorted(factors[:peak])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
    assert all(factor >= shape.min_factor - 1e-12 for factor in factors[peak:])
    if shape.steps > shape.warmup_steps:
        assert factors[shape.warmup_steps] == 1.0


@pytest.mark.parametrize(
    ("decay_type", "half"), [("linear", 0.5), ("sqrt", 1 - math.sqrt(0.5)), ("cosine", 0.5)]
)
def test_half_way_through_the_decay_the_rate_is_that_of_its_curve(decay_type: str, half: float) -> None:
    shape = LearningRateShape(100, 10, 0.2, decay_type, min_factor=0.1)
    assert lr_factor(81, shape) == 1.0
    assert lr_factor(91, shape) == pytest.approx(0.1 + 0.9 * half)
    assert lr_factor(101, shape) == pytest.approx(0.1)


def test_without_a_ratio_the_rate_falls_from_the_end_of_the_warm_up_to_the_end() -> None:
    factors = [lr_factor(step, LearningRateShape(6, 2)) for step in range(1, 8)]
    assert factors == pytest.approx([1 / 3, 2 / 3, 1.0, 0.75, 0.5, 0.25, 0.0])


def test_no_decay_keeps_the_full_rate_until_the_last_step() -> None:
    assert [lr_factor(step, LearningRateShape(5, 0, decay_ratio=0.0)) for step in range(1, 6)] == [1.0] * 5


def test_the_rate_of_every_update_is_set_in_every_group() -> None:
    optimizer = build_optimizer([Biased()], optimizer_table(), CPU)
    schedule = build_lr_schedule(optimizer, config())
    for step in range(1, 11):
        rate = 0.5 * lr_factor(step, LearningRateShape(10, 2))
        assert [group["lr"] for group in optimizer.param_groups] == [rate, rate]
        assert schedule.lr == rate
        optimizer.step()
        schedule.step()


@given(st.integers(0, 12))
def test_a_resumed_schedule_has_the_rates_of_a_straight_one_bit_for_bit(resumed_at: int) -> None:
    """Case C2."""

    def schedule_of_new_run() -> Any:
        return build_lr_schedule(torch.optim.AdamW([nn.Parameter(torch.zeros(1))]), config(steps=12))

    straight, resumed = schedule_of_new_run(), schedule_of_new_run()
    for _ in range(resumed_at):
        straight.step()
    resumed.load_state_dict(straight.state_dict())
    for _ in range(12 - resumed_at):
        assert resumed.lr == straight.lr
        assert resumed._optimizer.param_groups[0]["lr"] == straight.lr
        straight.step(), resumed.step()
