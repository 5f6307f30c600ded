"""A batch cut into what each microbatch of the pipeline is given: the same for training and validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from models.layers.sequences import Sequences
from trainer.data.loader import Batch


@dataclass(frozen=True)
class Microbatches:
    """Of each microbatch, in order: tokens and labels, both (rows, T), and where the tokens stand.

    `sequences` is None where every sequence is one document, from position 0.
    """

    tokens: tuple[Tensor, ...]
    labels: tuple[Tensor, ...]
    sequences: tuple[Sequences, ...] | None


def cut_into_microbatches(batch: Batch, rows: Sequence[int]) -> Microbatches:
    """Microbatch k gets the next `rows[k]` sequences of the batch."""
    cut = list(rows)
    sequences = None
    if batch.documents is not None:
        sequences = tuple(map(Sequences.packed, batch.documents.split(cut)))
    return Microbatches(batch.tokens.split(cut), batch.labels.split(cut), sequences)
