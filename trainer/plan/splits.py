"""Balanced splits of one model into stages, each made once."""

from __future__ import annotations

from models.sizes import Sizes
from models.tied import held_count
from parallelisms.pipeline.split import StageSplit, split_balanced


class Splits:
    """Splits by what modules compute, or by their parameters.

    The second makes the fullest rank hold as little as can be, where a large embedding and output would otherwise
    share their ranks with as many layers as others have.
    """

    def __init__(self, sizes: Sizes, seq_len: int) -> None:
        self._modules = sizes.modules()
        self._work = [float(sizes.flops_per_token(seq_len, name)) for name in self._modules]
        self._parameters = [float(held_count(sizes, (name,))) for name in self._modules]
        self._known: dict[tuple[int, bool], StageSplit] = {}

    def of(self, stages: int, by_parameters: bool) -> StageSplit:
        """The split into so many stages."""
        key = (stages, by_parameters)
        if key not in self._known:
            weights = self._parameters if by_parameters else self._work
            self._known[key] = split_balanced(self._modules, weights, stages)
        return self._known[key]

    def differ(self, stages: int) -> bool:
        """Whether the two ways lead to different splits."""
        return stages > 1 and self.of(stages, True) != self.of(stages, False)
