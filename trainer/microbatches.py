"""A batch cut into what each microbatch of the pipeline is given: the same for training and validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from models.layers.sequences import Sequences
from parallelisms.context.cut import SequenceCut
from trainer.data.loader import Batch


@dataclass(frozen=True)
class Microbatches:
    """Of each microbatch, in order: tokens and labels, both (rows, T), and where the tokens stand.

    With context parallelism T is the rank's part of the sequences. `sequences` is None where every sequence is one
    document, from position 0, and whole.
    """

    tokens: tuple[Tensor, ...]
    labels: tuple[Tensor, ...]
    sequences: tuple[Sequences, ...] | None


def cut_into_microbatches(
    batch: Batch, rows: Sequence[int], context: SequenceCut | None = None
) -> Microbatches:
    """Microbatch k gets the next `rows[k]` sequences of the batch, or this rank's part of them if `context` says
    that there is such a thing."""
    cut = list(rows)
    sequences = None
    if batch.documents is not None:
        sequences = tuple(map(Sequences.packed, batch.documents.split(cut)))
    tokens, labels = batch.tokens, batch.labels
    if context is not None:
        if sequences is None:
            sequences = (Sequences.in_order(tokens.shape[1], tokens.device),) * len(cut)
        sequences = tuple(map(context.sequences, sequences))
        tokens, labels = context.part(tokens), context.part(labels)
    return Microbatches(tokens.split(cut), labels.split(cut), sequences)
