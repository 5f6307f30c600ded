"""Bytes of a rank's training state: parameters, gradients, optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallelisms.layout import Layout

_FP32 = 4


@dataclass(frozen=True)
class StateBytes:
    """Bytes that a rank keeps for its stages through the whole run."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def state_bytes(parameters_of_stages: Sequence[int], layout: Layout) -> StateBytes:
    """State of one rank that owns stages with so many parameters each.

    Parameters, gradients and both moments of Adam are kept in fp32 and divided among the shard ranks; what a
    rank keeps of each parameter is rounded up to whole rows, which is not counted here.
    """
    share = -(-sum(parameters_of_stages) // layout.shard)
    return StateBytes(share * _FP32, share * _FP32, 2 * share * _FP32)
