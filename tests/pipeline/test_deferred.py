"""The split backward: gradients equal those of one backward, whatever the module does."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.layers.moe import MoE, Selection
from parallelisms.pipeline.deferred import accumulate, defer_weight_gradients


class Shared(nn.Module):
    """A module whose linear layers are used several times, with and without bias, in three dimensions."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.twice = nn.Linear(6, 6)
        self.once = nn.Linear(6, 6, bias=False)
        self.norm = nn.LayerNorm(6)
        self.forwards = 0
        self.checkpointed = checkpointed

    def block(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return self.twice(torch.tanh(self.once(self.twice(x))))

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)
        return self.norm(x + y)


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def run_both(module: nn.Module, microbatches: int = 3) -> tuple[nn.Module, nn.Module]:
    """The module after plain backwards, and a copy after split ones: all inputs first, then all weights."""
    plain, split = module, copy.deepcopy(module)
    store = defer_weight_gradients(split)
    torch.manual_seed(1)
    inputs = [torch.randn(2, 4, 6) for _ in range(microbatches)]
    waiting = []
    for x in inputs:
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        plain(a).square().sum().backward()
        output = split(b).square().sum()
        with store.collect() as pending:
            output.backward()
        assert torch.allclose(a.grad, b.grad, atol=1e-6)
        waiting.append(pending)
    for pending in waiting:
        assert pending
        accumulate(pending)
        assert not pending
    return plain, split


def assert_equal_gradients(plain: nn.Module, split: nn.Module) -> None:
    expected, actual = gradients(plain), gradients(split)
    assert expected.keys() == actual.keys()
    for name in expected:
        assert torch.allclose(expected[name], actual[name], atol=1e-5), name


def test_split_backward_equals_plain_backward_for_modules_used_more_than_once() -> None:
    assert_equal_gradients(*run_both(Shared()))


def test_split_backward_recomputes_a_checkpointed_block_once() -> None:
    plain, split = run_both(Shared(checkpointed=True), microbatches=1)
    assert_equal_gradients(plain, split)
    assert split.forwards == 2, "one forward and one recomputation, none for the weights"


def test_weight_gradients_are_absent_until_they_are_asked_for() -> None:
    module = Shared()
    store = defer_weight_gradients(module)
    with store.collect() as pending:
        module(torch.randn(2, 4, 6)).sum().backward()
    assert module.once.weight.grad is None
    accumulate(pending)
    assert module.once.weight.grad is not None


def test_one_gradient_buffer_per_parameter_however_many_microbatches() -> None:
    module = Shared()
    store = defer_weight_gradients(module)
    buffers = set()
    for _ in range(4):
        with store.collect() as pending:
            module(torch.randn(2, 4, 6)).sum().backward()
        accumulate(pending)
        buffers.add(module.once.weight.grad.data_ptr())
    assert len(buffers) == 1


def test_outside_of_a_split_backward_the_layers_are_ordinary() -> None:
    plain = Shared()
    deferring = copy.deepcopy(plain)
    defer_weight_gradients(deferring)
    x = torch.randn(2, 4, 6)
    plain(x).sum().backward()
    deferring(x).sum().backward()
    assert_equal_gradients(plain, deferring)


def test_frozen_weights_get_no_gradient() -> None:
    module = Shared()
    module.once.weight.requires_grad_(False)
    store = defer_weight_gradients(module)
    with store.collect() as pending:
        module(torch.randn(2, 4, 6)).sum().backward()
    accumulate(pending)
    assert module.once.weight.grad is None
    assert module.twice.weight.grad is not None


@pytest.mark.slow
def test_compiled_blocks_are_correct_under_split_backward() -> None:
    module = Shared()
    plain, split = module, copy.deepcopy(module)
    store = defer_weight_gradients(split)
    split.compile(backend="aot_eager")
    x = torch.randn(2, 4, 6)
    plain(x).square().sum().backward()
    output = split(x).square().sum()
    with store.collect() as pending:
        output.backward()
    accumulate(pending)
    assert_equal_gradients(plain, split)


class WithExperts(nn.Module):
    """A layer of experts, some of which get no token, of widths that the grouped kernel takes or does not."""

    def __init__(self, hidden: int, checkpointed: bool = False) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(6, 8), nn.Linear(8, 6)
        self.moe = MoE(8, hidden, Selection(8, 2), shared_hidden=4)
        for parameter in self.moe.parameters():
            nn.init.normal_(parameter, std=0.5)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        y = checkpoint(self.moe, h, use_reentrant=False) if self.checkpointed else self.moe(h)
        return self.after(y)


@pytest.mark.parametrize("hidden", [8, 7])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
def test_the_weights_of_experts_are_deferred_too(hidden: int, checkpointed: bool) -> None:
    torch.manual_seed(0)
    module = WithExperts(hidden, checkpointed)
    plain, split = run_both(module)
    expected, actual = gradients(plain), gradients(split)
    assert expected.keys() == actual.keys()
    assert all(torch.allclose(actual[name], expected[name], atol=1e-5) for name in expected)


def test_no_gradient_of_experts_is_there_before_the_weights_part() -> None:
    torch.manual_seed(0)
    module = WithExperts(8)
    store = defer_weight_gradients(module)
    with store.collect() as pending:
        module(torch.randn(2, 4, 6)).square().sum().backward()
    experts = module.moe.experts
    assert all(p.grad is None for p in experts.parameters())
    accumulate(pending)
    assert all(p.grad is not None for p in experts.parameters())
