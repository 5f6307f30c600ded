"""The number formats of a run, and which layers are computed twice."""

from __future__ import annotations

from dataclasses import dataclass

from parallelisms.layout import Parallelism
from parallelisms.pipeline.split import is_layer

_BYTES = {"float32": 4, "bfloat16": 2}
STATE_BYTES = 4  # parameters, gradients and moments are kept in fp32


@dataclass(frozen=True)
class Formats:
    """In which formats the model computes, and in which gradients are summed over data-parallel ranks."""

    compute: str
    reduction: str

    @property
    def compute_bytes(self) -> int:
        return _BYTES[self.compute]

    @property
    def reduction_bytes(self) -> int:
        return _BYTES[self.reduction]


def is_recomputed(module: str, parallelism: Parallelism) -> bool:
    """Whether a module's forward is done again in the backward: layers, by their index in the whole model."""
    if not is_layer(module) or parallelism.checkpointing == "none":
        return False
    every = 1 if parallelism.checkpointing == "full" else int(parallelism.checkpointing_option)
    return int(module.rpartition(".")[2]) % every == 0
