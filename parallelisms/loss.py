"""Cross-entropy of logits that may be cut by vocabulary over the ranks of a tensor group.

The logits are never gathered. Shoeybi et al. 2019, Megatron-LM (arXiv 1909.08053), section 3: what the ranks exchange
is, for each token, how large its logits are and the logit of its label: three numbers instead of V.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parallelisms.collectives import Group, all_gathered


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
        logits = logits.float()
        normaliser, of_labels, place = normalise(logits, labels, group)
        counts = labels != ignore
        ctx.save_for_backward((logits - normaliser[:, None]).exp_(), place, counts)
        return (normaliser - of_labels).masked_fill(~counts, 0).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, place, counts = ctx.saved_tensors
        weight = gradients[0] * counts
        gradient = subtract_at(probabilities * weight[:, None], place, weight)
        return gradient.to(ctx.logits_type), None, None, None


def normalise(logits: Tensor, labels: Tensor, group: Group | None) -> tuple[Tensor, Tensor, Tensor]:
    """Logarithms of the sums of exponentials (N,), logits of the labels (N,), and where these are in `logits` (N,).

    Args:
        logits: (N, V), or this rank's part of the vocabulary, fp32.
        labels: (N,). What is outside the vocabulary belongs to no rank: its logit is 0, its place -1.
        group: of the ranks that share the vocabulary.
    """
    width = logits.shape[1]
    place = labels if group is None else labels - group.rank * width
    elsewhere = (place < 0) | (place >= width)
    of_labels = logits.gather(1, place.masked_fill(elsewhere, 0)[:, None])[:, 0].masked_fill(elsewhere, 0)
    place = place.masked_fill(elsewhere, -1)
    normaliser = logits.logsumexp(1)
    if group is not None:
        both = all_gathered(torch.stack((normaliser, of_labels))[None], 0, group)  # (n, 2, N)
        normaliser, of_labels = both[:, 0].logsumexp(0), both[:, 1].sum(0)
    return normaliser, of_labels, place


def subtract_at(x: Tensor, place: Tensor, weight: Tensor) -> Tensor:
    """Take weight (N,) off x (N, V) at one place in each row, in place; where the place is -1, nothing."""
    return x.scatter_add_(1, place.clamp(min=0)[:, None], -weight.masked_fill(place < 0, 0)[:, None])
