"""The number formats of a run, and which layers are computed twice."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from models.sizes import Sizes
from parallelisms.layout import Parallelism
from parallelisms.pipeline.split import is_layer

_BYTES = {"float32": 4, "bfloat16": 2}
STATE_BYTES = (
    4  # parameters and gradients are kept in fp32, moments too unless the configuration says otherwise
)


def number_bytes(name: str) -> int:
    """Of a number in the format of this name."""
    return _BYTES[name]


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


class Recomputed(Enum):
    """What of a module's forward is done again in the backward."""

    NOTHING = "nothing"
    OPERATIONS = "operations"  # all but attention and every second matrix product
    ALL = "all"


def recomputed(module: str, parallelism: Parallelism) -> Recomputed:
    """Of layers, by their index in the whole model. What a compiler decides is not known: taken for nothing."""
    mode, option = parallelism.checkpointing, parallelism.checkpointing_option
    if not is_layer(module) or mode in ("none", "memory_budget"):
        return Recomputed.NOTHING
    if mode == "selective" and option == "op":
        return Recomputed.OPERATIONS
    every = 1 if mode == "full" else int(option)
    return Recomputed.ALL if int(module.rpartition(".")[2]) % every == 0 else Recomputed.NOTHING


def recomputed_flops(sizes: Sizes, module: str, seq_len: int, parallelism: Parallelism) -> int:
    """Operations for one token of what is done again; a forward is a third of forward and backward."""
    match recomputed(module, parallelism):
        case Recomputed.NOTHING:
            return 0
        case (
            Recomputed.OPERATIONS
        ):  # half of the matrix products; without attention, which grows with seq_len
            return sizes.flops_per_token(0, module) // 6
        case Recomputed.ALL:
            return sizes.flops_per_token(seq_len, module) // 3
