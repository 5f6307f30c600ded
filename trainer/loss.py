"""Cross-entropy over the tokens that count, divided by their number in the whole global batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from parallelisms.pipeline.stage import LossFunction
from trainer.data.loader import IGNORE


def counted_tokens(labels: Tensor) -> Tensor:
    """How many labels count, as a scalar on the labels' device."""
    return (labels != IGNORE).sum()


def cross_entropy(logits: Tensor, labels: Tensor, counted: Tensor) -> Tensor:
    """Sum of the tokens' cross-entropies divided by `counted`, in fp32.

    Args:
        logits: (B, T, V).
        labels: (B, T), IGNORE where a token does not count.
        counted: the number of counted tokens of the global batch (over all ranks, microbatches and
            accumulation steps). Sums of this over any partition of the global batch are the mean over its
            counted tokens; a part in which nothing counts contributes exactly 0.
    """
    total = F.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    return total / torch.clamp(counted, min=1)


def loss_of_microbatches(labels: Sequence[Tensor], counted: Tensor) -> LossFunction:
    """The loss function of one run of the pipeline, whose microbatch k has the labels `labels[k]`."""

    def loss(logits: Tensor, microbatch: int) -> Tensor:
        return cross_entropy(logits, labels[microbatch], counted)

    return loss
