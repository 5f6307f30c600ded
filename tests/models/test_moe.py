"""Experts: routing against a loop over tokens, grouped products against single ones, and what is counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from models.layers import moe as moe_layer
from models.layers.moe import Experts, MoE, Router, Selection, grouped_linear

DIM, HIDDEN, E = 16, 24, 8

SELECTIONS = {
    "softmax": Selection(E, 2),
    "softmax, not normalised": Selection(E, 3, normalised=False),
    "sigmoid with groups and bias": Selection(E, 2, "sigmoid", True, 2.5, 4, 2, biased=True),
    "sigmoid, all groups": Selection(E, 3, "sigmoid", True, 1.5, 2, 2, biased=True),
}


def build(selection: Selection, shared: int = 0) -> MoE:
    torch.manual_seed(3)
    layer = MoE(DIM, HIDDEN, selection, shared)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    if layer.router.expert_bias is not None:
        layer.router.expert_bias.copy_(torch.linspace(-0.4, 0.4, E))
    return layer


def of_one_token(layer: MoE, x: Tensor) -> Tensor:
    """The published formulas, one token and one expert at a time."""
    chosen = layer.router.selection
    affinities = (layer.router.gate.weight @ x).tolist()
    if chosen.score == "softmax":
        total = sum(torch.tensor(a).exp().item() for a in affinities)
        scores = [torch.tensor(a).exp().item() / total for a in affinities]
    else:
        scores = [1 / (1 + torch.tensor(-a).exp().item()) for a in affinities]
    bias = layer.router.expert_bias
    biased = [s + (0.0 if bias is None else float(bias[i])) for i, s in enumerate(scores)]
    size = E // chosen.groups
    by_group = [(sum(sorted(biased[g * size : (g + 1) * size])[-2:]), g) for g in range(chosen.groups)]
    allowed = {g for _, g in sorted(by_group)[-chosen.groups_per_token :]}
    candidates = [i for i in range(E) if i // size in allowed]
    experts = sorted(candidates, key=lambda i: -biased[i])[: chosen.per_token]
    total = sum(scores[i] for i in experts) if chosen.normalised else 1.0
    y = torch.zeros_like(x)
    for i in experts:
        w1, w2, w3 = (w[i] for w in (layer.experts.w1, layer.experts.w2, layer.experts.w3))
        y = y + chosen.scale * scores[i] / total * (w2 @ (F.silu(w1 @ x) * (w3 @ x)))
    return y if layer.shared_experts is None else y + layer.shared_experts(x)


@pytest.mark.parametrize("selection", SELECTIONS.values(), ids=SELECTIONS)
@pytest.mark.parametrize("shared", [0, 32], ids=["", "shared"])
def test_a_layer_is_what_the_papers_say_token_by_token(selection: Selection, shared: int) -> None:
    layer = build(selection, shared)
    x = torch.randn(3, 5, DIM)
    expected = torch.stack([torch.stack([of_one_token(layer, token) for token in row]) for row in x])
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)


@given(counts=st.lists(st.integers(0, 5), min_size=1, max_size=6), odd=st.booleans())
@settings(max_examples=25, deadline=None)
def test_grouped_products_equal_single_ones_with_empty_experts_and_any_width(
    counts: list[int], odd: bool
) -> None:
    """Also of rows whose widths the grouped kernel does not take, and all gradients."""
    wide, narrow = (13, 7) if odd else (16, 8)
    x = torch.randn(sum(counts), wide, requires_grad=True)
    weight = torch.randn(len(counts), narrow, wide, requires_grad=True)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    y = grouped_linear(x, weight, ends)
    expected = [w @ t for t, w in zip(x, weight.repeat_interleave(torch.tensor(counts), 0), strict=True)]
    reference = torch.stack(expected) if expected else x.new_zeros(0, narrow) + 0 * weight.sum() + 0 * x.sum()
    torch.testing.assert_close(y, reference)
    gradient = torch.randn_like(y)
    for ours, theirs in zip(
        torch.autograd.grad(y, (x, weight), gradient),
        torch.autograd.grad(reference, (x, weight), gradient),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_both_paths_of_experts_are_equal_in_bf16_too(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = Experts(E, DIM, HIDDEN).bfloat16()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    counts = torch.tensor([0, 9, 1, 0, 4, 4, 2, 0])
    x = torch.randn(20, DIM).bfloat16()
    grouped = experts(x, counts)
    monkeypatch.setattr(moe_layer, "has_grouped_kernel", lambda *_: False)
    torch.testing.assert_close(experts(x, counts), grouped, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", SELECTIONS)
def test_experts_can_be_used_in_turn_whatever_their_scores(name: str) -> None:
    layer = build(SELECTIONS[name])
    layer.router.in_turn = True
    x = torch.randn(16, DIM)
    routing = layer.router(x)
    assert routing.counts.tolist() == [16 * layer.router.selection.per_token // E] * E
    assert all(len(set(experts)) == len(experts) for experts in routing.experts.tolist())


def train_once(layer: MoE, x: Tensor, forward: Callable[[Tensor], Tensor]) -> list[Tensor]:
    layer.zero_grad()
    x = x.clone().requires_grad_()
    forward(x).square().mean().backward()
    assert x.grad is not None
    return [x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


def test_tokens_are_counted_once_for_each_backward_however_the_layer_is_recomputed() -> None:
    layer = build(SELECTIONS["sigmoid with groups and bias"])
    x = torch.randn(2, 6, DIM)
    with torch.no_grad():
        layer(x)
    assert layer.router.tokens_per_expert.sum() == 0  # nothing was trained on
    plain = train_once(layer, x, layer)
    once = layer.router.tokens_per_expert.clone()
    assert once.sum() == 2 * 6 * 2
    recomputed = train_once(layer, x, lambda x: checkpoint(layer, x, use_reentrant=False))
    assert torch.equal(layer.router.tokens_per_expert, 2 * once)
    for ours, theirs in zip(recomputed, plain, strict=True):
        torch.testing.assert_close(ours, theirs)


def balance_loss(router: Router, x: Tensor) -> Tensor:
    """Equations 17 to 20, sequence by sequence and expert by expert."""
    chosen, total = router.selection, x.new_zeros(())
    for row in x:
        experts = router(row).experts
        affinities = router.gate(row)
        scores = affinities.softmax(-1) if chosen.score == "softmax" else affinities.sigmoid()
        for i in range(chosen.n_experts):
            f = chosen.n_experts / (chosen.per_token * len(row)) * (experts == i).sum()
            total = total + f * (scores[:, i] / scores.sum(-1)).mean()
    return total


@pytest.mark.parametrize("name", ["softmax", "sigmoid with groups and bias"])
def test_the_gradient_of_the_balance_loss_joins_that_of_the_loss(name: str) -> None:
    layer = build(SELECTIONS[name])
    x = torch.randn(3, 7, DIM)
    before = train_once(layer, x, layer)
    layer.router.loss_per_sequence = 0.25
    after = train_once(layer, x, layer)
    layer.router.loss_per_sequence = 0.0
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    (0.25 * balance_loss(layer.router, leaf)).backward()
    assert leaf.grad is not None
    assert layer.router.gate.weight.grad is not None
    torch.testing.assert_close(after[0] - before[0], leaf.grad, rtol=1e-4, atol=1e-6)
    gate = [p is layer.router.gate.weight for p in layer.parameters()].index(True) + 1
    torch.testing.assert_close(
        after[gate] - before[gate], layer.router.gate.weight.grad, rtol=1e-4, atol=1e-6
    )


def test_parts_of_sequences_have_the_balance_loss_of_the_whole_ones() -> None:
    """What context parallelism sets: the counts of whole sequences."""
    layer = build(SELECTIONS["softmax"])
    x = torch.randn(2, 8, DIM)
    layer.router.loss_per_sequence = 0.5
    whole = train_once(layer, x, _weights(layer))
    counts = []
    for half in (x[:, :4], x[:, 4:]):
        experts = layer.router(half.flatten(0, 1), 2).experts.view(2, -1)
        counts.append(torch.stack([row.bincount(minlength=E) for row in experts]).float())
    layer.router.sum_over_sequence = lambda _: counts[0] + counts[1]
    halves = [train_once(layer, half, _weights(layer)) for half in (x[:, :4], x[:, 4:])]
    torch.testing.assert_close(halves[0][1] + halves[1][1], whole[1], rtol=1e-4, atol=1e-7)


def _weights(layer: MoE) -> Callable[[Tensor], Tensor]:
    """Weights alone, with next to no loss of their own: what is left is the balance loss."""
    return lambda x: 1e-9 * layer.router(x.flatten(0, 1), x.shape[0]).weights


def test_experts_take_their_number_and_width_from_the_parameters() -> None:
    """A rank with some experts, or with a part of each: parts add up to the whole."""
    experts = Experts(4, DIM, HIDDEN)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    x, counts = torch.randn(9, DIM), torch.tensor([2, 3, 0, 4])
    whole = experts(x, counts)

    def part(rows: slice, width: slice) -> Experts:
        some = Experts(1, 1, 1)
        some.w1, some.w3 = (torch.nn.Parameter(w[rows, width].clone()) for w in (experts.w1, experts.w3))
        some.w2 = torch.nn.Parameter(experts.w2[rows, :, width].clone())
        return some

    every = slice(None)
    first, second = part(slice(0, 2), every), part(slice(2, 4), every)
    torch.testing.assert_close(torch.cat([first(x[:5], counts[:2]), second(x[5:], counts[2:])]), whole)
    left, right = part(every, slice(0, 8)), part(every, slice(8, HIDDEN))
    torch.testing.assert_close(left(x, counts) + right(x, counts), whole, rtol=1e-4, atol=1e-4)
