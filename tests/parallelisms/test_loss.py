"""The loss of a divided vocabulary, and the loss without all logits: values and gradients are the plain ones'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from parallelisms.collectives import Group
from parallelisms.fused_loss import FusedOutput, WeightGradient
from parallelisms.loss import TokenLosses
from parallelisms.pipeline.stage import Stage
from tests.distributed.ranks import run_ranks

IGNORE = -100
DIM, VOCABULARY = 16, 50


def inputs(tokens: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states and weight, both with a gradient to come, and labels of which some do not count."""
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(1, tokens, DIM, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, DIM, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(VOCABULARY, (1, tokens), generator=generator)
    labels[0, :: max(2, tokens // 3)] = IGNORE
    return h, weight, labels


def textbook(h: Tensor, weight: Tensor, labels: Tensor, divisor: float) -> tuple[Tensor, Tensor, Tensor]:
    logits = F.linear(h, weight).float().flatten(0, 1)
    loss = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum") / divisor
    of_h, of_weight = torch.autograd.grad(loss, (h, weight))
    return loss.detach(), of_h, of_weight


def losses_of(labels: Tensor, divisor: float, vocabulary: Group | None = None) -> TokenLosses:
    return TokenLosses([labels], torch.tensor(divisor), IGNORE, vocabulary)


@given(tokens=st.integers(1, 40), chunk=st.integers(1, 50), seed=st.integers(0, 100))
@settings(max_examples=25, deadline=None)
def test_in_chunks_of_any_size_loss_and_gradients_are_the_plain_ones(
    tokens: int, chunk: int, seed: int
) -> None:
    h, weight, labels = inputs(tokens, seed=seed)
    expected = textbook(h, weight, labels, divisor=7.0)
    loss = losses_of(labels, 7.0).of_hidden(h, weight, 0, WeightGradient(), chunk)
    actual = (loss.detach(), *torch.autograd.grad(loss, (h, weight)))
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_in_bf16_the_gradients_are_as_close_to_the_exact_ones_as_the_plain_ones_are() -> None:
    h, weight, labels = inputs(300, torch.bfloat16)
    exact = textbook(
        h.detach().double().requires_grad_(), weight.detach().double().requires_grad_(), labels, 9.0
    )
    plain = textbook(h, weight, labels, 9.0)
    loss = losses_of(labels, 9.0).of_hidden(h, weight, 0, WeightGradient(), chunk=32)
    fused = (loss.detach(), *torch.autograd.grad(loss, (h, weight)))
    for of_fused, of_plain, truth in zip(fused, plain, exact, strict=True):
        assert (of_fused.double() - truth).norm() <= 1.2 * (of_plain.double() - truth).norm() + 1e-5


def test_without_gradients_nothing_is_kept() -> None:
    h, weight, labels = inputs(20)
    accumulated = WeightGradient()
    with torch.no_grad():
        loss = losses_of(labels, 5.0).of_hidden(h, weight, 0, accumulated, 8)
    assert not loss.requires_grad
    assert accumulated.take() is None
    assert float(loss) == pytest.approx(float(textbook(h, weight, labels, 5.0)[0]), rel=1e-6)


def test_a_microbatch_without_any_label_that_counts_contributes_exactly_nothing() -> None:
    h, weight, labels = inputs(12)
    labels.fill_(IGNORE)
    loss = losses_of(labels, 3.0).of_hidden(h, weight, 0, WeightGradient(), 4)
    assert loss.detach() == 0
    assert all(not gradient.any() for gradient in torch.autograd.grad(loss, (h, weight)))


class _Last(nn.Module):
    """The end of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, x: Tensor, sequences: Any = None) -> Tensor:
        logits: Tensor = self.output(x)
        return logits


@pytest.mark.parametrize("split", [False, True])
def test_forwards_before_their_backwards_share_one_weight_gradient(split: bool) -> None:
    """Case P12, for a stage that makes the weight's gradient with the loss."""
    module = _Last()
    stage = Stage(1, module, last=True, split_backward=split, loss_chunk=4)
    batches = [inputs(10, seed=seed) for seed in range(5)]
    losses = TokenLosses([labels for _, _, labels in batches], torch.tensor(6.0), IGNORE)
    expected = [textbook(h, module.output.weight, labels, 6.0) for h, _, labels in batches]
    total = sum(float(stage.forward(k, h.detach(), losses)) for k, (h, _, _) in enumerate(batches))
    for k in range(5):
        gradient = stage.backward_input(k, None) if split else stage.backward(k, None)
        assert gradient is not None
        torch.testing.assert_close(gradient, expected[k][1], rtol=1e-5, atol=1e-6)
        if k == 0:  # the first backward has handed on all that there is
            whole = module.output.weight.grad
            assert whole is not None
            torch.testing.assert_close(whole, sum(each[2] for each in expected), rtol=1e-5, atol=1e-6)
        if split:
            stage.backward_weight(k)
    assert total == pytest.approx(sum(float(each[0]) for each in expected), rel=1e-6)
    torch.testing.assert_close(
        module.output.weight.grad, sum(each[2] for each in expected), rtol=1e-5, atol=1e-6
    )


def test_gradients_that_no_backward_asked_for_are_forgotten_with_the_step() -> None:
    module = _Last()
    stage = Stage(1, module, last=True, split_backward=False, loss_chunk=4)
    h, _, labels = inputs(10)
    stage.forward(0, h.detach(), losses_of(labels, 6.0))
    stage.forget()
    stage.forward(0, h.detach(), losses_of(labels, 6.0))
    stage.backward(0, None)
    expected = textbook(h, module.output.weight, labels, 6.0)[2]
    torch.testing.assert_close(module.output.weight.grad, expected, rtol=1e-5, atol=1e-6)


def test_an_output_that_is_asked_for_no_loss_gives_logits() -> None:
    output = nn.Linear(DIM, VOCABULARY, bias=False)
    h = inputs(3)[0]
    expected = output(h)
    FusedOutput(output, chunk=2)
    assert torch.equal(output(h), expected)


def _divided(rank: int) -> list[Tensor]:
    group = Group.of(init_device_mesh("cpu", (2,)))
    h, weight, labels = inputs(30)
    part = weight.detach().chunk(2)[rank].clone().requires_grad_()
    losses = losses_of(labels, 4.0, group)
    found: list[Tensor] = []
    for loss in (losses(h @ part.t(), 0), losses.of_hidden(h, part, 0, WeightGradient(), 8)):
        found += [loss.detach(), *torch.autograd.grad(loss, (h, part))]
    return found


def test_ranks_with_parts_of_the_vocabulary_find_the_loss_of_all_of_it() -> None:
    h, weight, labels = inputs(30)
    loss, of_h, of_weight = textbook(h, weight, labels, 4.0)
    ranks = [[torch.as_tensor(each) for each in rank] for rank in run_ranks(_divided, 2)]
    for kind in (0, 3):  # of logits, of hidden states
        for rank, part in zip(ranks, of_weight.chunk(2), strict=True):
            torch.testing.assert_close(rank[kind], loss, rtol=1e-6, atol=0)
            torch.testing.assert_close(rank[kind + 2], part, rtol=1e-5, atol=1e-6)
        # Each rank has the share of its part of the vocabulary.
        torch.testing.assert_close(ranks[0][kind + 1] + ranks[1][kind + 1], of_h, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_an_accelerator_chunks_take_less_memory_and_give_the_same() -> None:
    h = torch.randn(1, 4096, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(32000, 512, device="cuda", dtype=torch.bfloat16).mul_(0.04).requires_grad_()
    labels = torch.randint(32000, (1, 4096), device="cuda")
    losses = TokenLosses([labels], torch.tensor(4096.0, device="cuda"), IGNORE)
    found: list[tuple[Tensor, ...]] = []
    peaks = []
    for fused in (False, True):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        if fused:
            loss = losses.of_hidden(h, weight, 0, WeightGradient(), 512)
        else:
            loss = losses(F.linear(h, weight), 0)
        found.append((loss.detach(), *torch.autograd.grad(loss, (h, weight))))
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del loss
    for plain, other in zip(*found, strict=True):
        assert (plain.float() - other.float()).norm() <= 1e-2 * plain.float().norm()
    assert peaks[1] < peaks[0] / 2
