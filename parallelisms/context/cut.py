"""The part of a batch that a context rank works on: tokens, labels, positions and documents, cut alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from models.layers.sequences import Sequences
from parallelisms.context.split import SequenceSplit


@dataclass(frozen=True)
class CutSequences(Sequences):
    """Sequences of which this rank has a part; positions and documents are those of the part.

    Attributes:
        whole_documents: (B, T), the documents of all tokens in their order, also those of other ranks: keys come
            from there. Every rank has the whole batch before it is cut, so nobody has to be asked for them.
    """

    whole_documents: Tensor | None = None


@dataclass(frozen=True)
class SequenceCut:
    """Cuts out what one rank has of every sequence."""

    split: SequenceSplit
    rank: int

    def part(self, x: Tensor) -> Tensor:
        """The rank's columns of (B, T), (B, T / degree); of a shape (T,) the same."""
        chunks = self.split.chunks(self.rank, x.shape[-1])
        return torch.cat([x[..., chunk.start : chunk.stop] for chunk in chunks], dim=-1)

    def sequences(self, whole: Sequences) -> CutSequences:
        """The rank's part of sequences whose positions and documents are those of all tokens."""
        documents = None if whole.documents is None else self.part(whole.documents)
        return CutSequences(self.part(whole.positions), documents, whole_documents=whole.documents)
