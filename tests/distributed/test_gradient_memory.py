"""However many microbatches, there is one gradient of each weight (case P12: memory that grows with them)."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from models.llama.model import Transformer
from parallelisms.pipeline.schedules.catalogue import FAMILIES
from tests.distributed.pipeline_run import TINY, Case, run_case
from tests.distributed.ranks import run_ranks

# No activation has the shape of a weight, whose gradients are therefore known by their shape.
SIZES = replace(TINY, dim=20, ffn_hidden=26)


class LiveTensors(TorchDispatchMode):
    """How many tensors of the given shapes are alive, at most, among those that operations make."""

    def __init__(self, shapes: set[tuple[int, ...]]) -> None:
        super().__init__()
        self._shapes = shapes
        self._alive: dict[int, weakref.ref[Tensor]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # A view has its base's storage and is not counted again.
        if (
            isinstance(result, Tensor)
            and tuple(result.shape) in self._shapes
            and result.device.type != "meta"
        ):
            self._alive.setdefault(result.untyped_storage().data_ptr(), weakref.ref(result))
            self._alive = {pointer: alive for pointer, alive in self._alive.items() if alive() is not None}
            self.most = max(self.most, len(self._alive))
        return result


def most_alive(rank: int, cases: list[Case]) -> list[int]:
    """The most tensors of weights' shapes that are alive at once on this rank, in each case."""
    most = []
    for case in cases:
        with torch.device("meta"):
            weights = [tuple(p.shape) for p in Transformer(case.sizes).parameters() if p.dim() == 2]
        with LiveTensors({*weights, *(shape[::-1] for shape in weights)}) as live:
            run_case(rank, case)
        most.append(live.most)
    return most


QUICK = ("GPipe", "1F1B", "ZBVZeroBubble")


@pytest.mark.parametrize(
    "name", [f.name if f.name in QUICK else pytest.param(f.name, marks=pytest.mark.slow) for f in FAMILIES]
)
def test_as_many_gradients_are_alive_with_sixteen_microbatches_as_with_two(name: str) -> None:
    cases = [Case(name, 2, microbatches, batch=16, sizes=SIZES) for microbatches in (2, 16)]
    for few, many in run_ranks(most_alive, 2, cases):
        assert many <= few + 2  # one that is being added may be counted or not
        assert few <= 1.2 * 2 * 33  # initial parameters and gradients of half of the 65 matrices
