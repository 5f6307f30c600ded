"""Which experts each token goes to, and how their outputs are weighed.

Two published ways, which differ in what is made of a token's affinity to each expert:

- softmax over all experts, the K largest (Shazeer et al. 2017, arXiv 1701.06538; Qwen3, arXiv 2505.09388);
- sigmoid of each, the K largest within the best groups after a bias is added that serves the choice alone
  (DeepSeek-AI 2024, DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

No token is ever dropped, however uneven the choice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Selection:
    """How experts are chosen and weighed.

    Attributes:
        n_experts: how many there are (E).
        per_token: how many each token goes to (K).
        score: what is made of the affinities.
        normalised: the weights of a token's experts are divided by their sum.
        scale: all weights are multiplied by it.
        groups: experts form so many groups of neighbours.
        groups_per_token: a token's experts are in at most so many groups, those with the largest sum of their two
            largest scores.
        biased: a bias for each expert is added to the scores for the choice.
    """

    n_experts: int
    per_token: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_per_token: int = 1
    biased: bool = False


@dataclass(frozen=True)
class Routing:
    """Where N tokens go.

    Attributes:
        experts: (N, K) int64, the experts of each token.
        weights: (N, K), by which their outputs are multiplied before they are added; of the tokens' type.
        counts: (E,) int64, how many tokens each expert gets.
    """

    experts: Tensor
    weights: Tensor
    counts: Tensor


class Router(nn.Module):
    """Chooses the experts of tokens, and counts how many each expert gets.

    Attributes:
        expert_bias: (E,) fp32, added to the scores for the choice; a buffer that is saved, changed after each
            optimizer step so that experts get equally many tokens (Wang et al. 2024, arXiv 2408.15664). None unless
            the selection is biased.
        tokens_per_expert: (E,) int64, tokens of all microbatches whose backward has run since it was last set to 0.
        loss_per_sequence: how much the balance loss of one sequence adds to the loss: its coefficient divided by
            the sequences of the global batch. 0: nothing.
        in_turn: experts are chosen one after the other and not by their scores, so that all are used equally: for
            measurements of speed, which then do not depend on what was learned.
        sum_over_sequence: from the counts of this rank's part of each sequence (B, E) to those of whole sequences;
            context parallelism sets it.
    """

    expert_bias: Tensor | None
    tokens_per_expert: Tensor

    def __init__(self, dim: int, selection: Selection) -> None:
        super().__init__()
        self.selection = selection
        self.gate = nn.Linear(dim, selection.n_experts, bias=False)
        bias = torch.zeros(selection.n_experts, dtype=torch.float32) if selection.biased else None
        self.register_buffer("expert_bias", bias)
        counts = torch.zeros(selection.n_experts, dtype=torch.int64)
        self.register_buffer("tokens_per_expert", counts, persistent=False)
        self.loss_per_sequence = 0.0
        self.in_turn = False
        self.sum_over_sequence: Callable[[Tensor], Tensor] = _itself

    def forward(self, x: Tensor, rows: int = 1) -> Routing:
        """Route the tokens x (N, D), which are `rows` sequences of equal length, one after the other."""
        affinities = self.gate(x).float()
        softmax = self.selection.score == "softmax"
        scores = affinities.softmax(-1) if softmax else affinities.sigmoid()
        experts = self._choose(scores.detach())
        weights = scores.gather(-1, experts)
        if self.selection.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # sigmoids may all be 0
        weights = weights * self.selection.scale
        counts = _count(experts, rows, self.selection.n_experts)
        if weights.requires_grad:
            loss = self._balance_loss(scores, counts) if self.loss_per_sequence else scores.new_zeros(())
            weights = _Balanced.apply(weights, loss, counts, self.tokens_per_expert)
        return Routing(experts, weights.type_as(x), counts.sum(0))

    def _choose(self, scores: Tensor) -> Tensor:
        """(N, E) to the K experts of each token, (N, K), the best first."""
        selection = self.selection
        if self.in_turn:
            uses = torch.arange(scores.shape[0] * selection.per_token, device=scores.device)
            return (uses % selection.n_experts).unflatten(0, (-1, selection.per_token))
        if self.expert_bias is not None:
            scores = scores + self.expert_bias
        if selection.groups_per_token < selection.groups:
            grouped = scores.unflatten(-1, (selection.groups, -1))  # (N, G, E / G)
            of_group = grouped.topk(2, dim=-1).values.sum(-1)
            best = of_group.topk(selection.groups_per_token, dim=-1).indices
            chosen = torch.zeros_like(of_group, dtype=torch.bool).scatter(-1, best, True)
            scores = grouped.masked_fill(~chosen.unsqueeze(-1), -torch.inf).flatten(-2)
        return scores.topk(selection.per_token, dim=-1).indices

    def _balance_loss(self, scores: Tensor, counts: Tensor) -> Tensor:
        """The sum over sequences of Σ f_i P_i times `loss_per_sequence` (DeepSeek-V3, equations 17 to 20).

        f_i is the share of a sequence's tokens that expert i gets, 1 if all get equally many, and P_i the mean of
        its share in the tokens' scores. P is that of this rank's part of a sequence alone: the loss is linear in
        it, so the parts of all ranks add up to the whole.
        """
        selection = self.selection
        whole = self.sum_over_sequence(counts.float())  # (B, E)
        length = whole.sum(-1, keepdim=True) / selection.per_token
        f = whole * selection.n_experts / (selection.per_token * length)
        shares = scores if selection.score == "softmax" else scores / (scores.sum(-1, keepdim=True) + 1e-20)
        p = shares.unflatten(0, (counts.shape[0], -1)).sum(1) / length
        return (f * p).sum() * self.loss_per_sequence


class _Balanced(torch.autograd.Function):
    """The weights as they are; their backward counts the tokens and brings in the gradient of the balance loss.

    In the backward, since it runs exactly once for each microbatch that is trained on, whatever is recomputed
    and whatever else is evaluated. So neither the loss nor what a pipeline sends knows of the balance loss.
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor, counts: Tensor, total: Tensor) -> Tensor:
        ctx.save_for_backward(counts)
        ctx.total = total  # not saved: it is changed in place
        ctx.loss_type = loss.dtype
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (gradient,) = gradients
        (counts,) = ctx.saved_tensors
        ctx.total.add_(counts.sum(0))
        return gradient, torch.ones((), dtype=ctx.loss_type, device=gradient.device), None, None


def _count(experts: Tensor, rows: int, n_experts: int) -> Tensor:
    """How many tokens of each of the `rows` sequences go to each expert: (N, K) to (rows, E), int64."""
    of_row = experts.reshape(rows, -1)
    counts = torch.zeros(rows, n_experts, dtype=torch.int64, device=experts.device)
    return counts.scatter_add_(1, of_row, torch.ones_like(of_row))


def _itself(counts: Tensor) -> Tensor:
    return counts
