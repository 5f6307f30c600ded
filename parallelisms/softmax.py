"""Softmax and cross-entropy of tokens whose logits may be divided by vocabulary over ranks; without autograd."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parallelisms.collectives import Group, all_gathered


@dataclass(frozen=True)
class Softmax:
    """Of N tokens over a vocabulary, of which this rank has V.

    Attributes:
        exponentials: (N, V), the probabilities but for a factor.
        scale: (N,), that factor.
        place: (N,), the index of each token's label among these V; -1 if it is not among them.
        cross_entropies: (N,), over the whole vocabulary; of no meaning for a label that is in no part of it.
    """

    exponentials: Tensor
    scale: Tensor
    place: Tensor
    cross_entropies: Tensor

    @classmethod
    def of(cls, logits: Tensor, labels: Tensor, group: Group | None) -> Softmax:
        """Of logits (N, V) in fp32, whose memory becomes that of the exponentials. Collective over the group."""
        width = logits.shape[1]
        place = labels if group is None else labels - group.rank * width
        elsewhere = (place < 0) | (place >= width)
        of_labels = logits.gather(1, place.masked_fill(elsewhere, 0)[:, None])[:, 0].masked_fill(elsewhere, 0)
        largest = logits.amax(1)
        exponentials = logits.sub_(largest[:, None]).exp_()
        normaliser = exponentials.sum(1).log_().add_(largest)
        if group is not None:
            both = all_gathered(torch.stack((normaliser, of_labels))[None], 0, group)  # (n, 2, N)
            normaliser, of_labels = both[:, 0].logsumexp(0), both[:, 1].sum(0)
        scale = largest.sub_(normaliser).exp_()
        return cls(exponentials, scale, place.masked_fill(elsewhere, -1), normaliser - of_labels)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The attributes in their order."""
        return self.exponentials, self.scale, self.place, self.cross_entropies

    def gradient(self, weight: Tensor) -> Tensor:
        """Of the sum of weight (N,) times the cross-entropies, by the logits (N, V): a new tensor."""
        return _subtract_at(self.exponentials * (self.scale * weight)[:, None], self.place, weight)

    def gradient_in_place(self, weight: Tensor) -> Tensor:
        """The same in the memory of the exponentials, which are lost."""
        return _subtract_at(self.exponentials.mul_((self.scale * weight)[:, None]), self.place, weight)


def _subtract_at(x: Tensor, place: Tensor, weight: Tensor) -> Tensor:
    """Take weight (N,) off x (N, V) at one place in each row, in place; where the place is -1, nothing."""
    return x.scatter_add_(1, place.clamp(min=0)[:, None], -weight.masked_fill(place < 0, 0)[:, None])
