"""The split backward: gradients equal those of one backward, whatever the module does."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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
