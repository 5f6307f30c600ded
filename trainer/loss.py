"""Cross-entropy over the tokens that count, divided by their number in the whole global batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parallelisms.collectives import Group
from parallelisms.loss import TokenLosses
from trainer.data.loader import IGNORE


def counted_tokens(labels: Tensor) -> Tensor:
    """How many labels count, as a scalar on the labels' device."""
    return (labels != IGNORE).sum()


def loss_of_microbatches(
    labels: Sequence[Tensor], counted: Tensor, vocabulary: Group | None = None
) -> TokenLosses:
    """The loss function of one run of the pipeline.

    Args:
        labels: of each microbatch, (B, T), IGNORE where a token does not count.
        counted: the number of counted tokens of the global batch (over all ranks, microbatches and
            accumulation steps). Sums of the losses over any partition of the global batch are the mean over its
            counted tokens; a part in which nothing counts contributes exactly 0.
        vocabulary: the ranks among which the vocabulary is divided, if it is.
    """
    return TokenLosses(labels, torch.clamp(counted, min=1), IGNORE, vocabulary)
