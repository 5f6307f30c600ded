"""Cross-entropy of logits that may be cut by vocabulary over the ranks of a tensor group.

The logits are never gathered. Shoeybi et al. 2019, Megatron-LM (arXiv 1909.08053), section 3: what the ranks exchange
is, for each token, how large its logits are and the logit of its label: two numbers instead of V.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parallelisms.collectives import Group
from parallelisms.fused_loss import WeightGradient, fused_cross_entropy
from parallelisms.softmax import Softmax


@dataclass(frozen=True)
class TokenLosses:
    """The loss of one run of a pipeline: cross-entropies of all tokens that count, added up and divided.

    Attributes:
        labels: of each microbatch, (B, T), `ignore` where a token does not count.
        divisor: a scalar.
        ignore: a number that is no label.
        vocabulary: the ranks among which the vocabulary is divided, if it is.
    """

    labels: Sequence[Tensor]
    divisor: Tensor
    ignore: int
    vocabulary: Group | None = None

    def __call__(self, logits: Tensor, microbatch: int) -> Tensor:
        """Of a microbatch's logits (B, T, V), or this rank's part of them (B, T, V / n): a scalar in fp32."""
        total = sum_of_cross_entropies(logits, self.labels[microbatch], self.ignore, self.vocabulary)
        return total / self.divisor

    def of_hidden(
        self, h: Tensor, weight: Tensor, microbatch: int, accumulated: WeightGradient, chunk: int
    ) -> Tensor:
        """The same of the hidden states (B, T, D) whose product with weight (V, D) the logits are."""
        counts = self.labels[microbatch] != self.ignore
        factors = counts / self.divisor
        return fused_cross_entropy(
            h, weight, self.labels[microbatch], factors, self.vocabulary, accumulated, chunk
        )


def sum_of_cross_entropies(logits: Tensor, labels: Tensor, ignore: int, group: Group | None = None) -> Tensor:
    """The cross-entropies of all tokens, added up, in fp32.

    Args:
        logits: (..., V), or, with a group, this rank's part of the vocabulary (..., V / n).
        labels: (...), indices into the whole vocabulary, or `ignore` where a token does not count.
        ignore: a number that is no label.
        group: of ranks that each have the logits of the same tokens and their own part of the vocabulary, in order.
            All of them get the whole sum.
    """
    logits, labels = logits.flatten(0, -2), labels.flatten()
    if group is None:
        return F.cross_entropy(logits.float(), labels, ignore_index=ignore, reduction="sum")
    total: Tensor = _VocabularyParallel.apply(logits, labels, ignore, group)
    return total


class _VocabularyParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ignore: int, group: Group) -> Tensor:
        ctx.logits_type = logits.dtype
        # A copy in any case: the logits themselves are not ours to write to.
        softmax = Softmax.of(logits.to(torch.float32, copy=True), labels, group)
        counts = labels != ignore
        ctx.save_for_backward(*softmax.tensors, counts)
        return softmax.cross_entropies.masked_fill(~counts, 0).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        *tensors, counts = ctx.saved_tensors
        gradient = Softmax(*tensors).gradient(gradients[0] * counts)
        return gradient.to(ctx.logits_type), None, None, None
