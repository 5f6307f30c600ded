"""Which modules form which stage: by split points, by layers per stage, or balanced by cost.

Modules come in the order in which data flows: "tok_embeddings", "layers.0", ..., "norm", "output". A stage is
a run of consecutive modules; every module is in exactly one stage and every stage has at least one layer.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from parallelisms.pipeline.errors import SplitError


@dataclass(frozen=True)
class StageSplit:
    """`stages[i]` are the names of the modules of stage i, in order."""

    stages: tuple[tuple[str, ...], ...]

    @property
    def layers_per_stage(self) -> tuple[int, ...]:
        """How many layers each stage has."""
        return tuple(sum(map(is_layer, modules)) for modules in self.stages)


def is_layer(module: str) -> bool:
    """Whether a module is one of the repeated ones."""
    return module.startswith("layers.")


def stages_per_rank(stages: int, ranks: int) -> int:
    """Stages of each rank. Raises SplitError unless all ranks get the same number, at least one."""
    if stages < ranks or stages % ranks:
        raise SplitError(
            f"{stages} stages cannot be shared evenly by {ranks} pipeline ranks: "
            f"the number of stages must be a multiple of {ranks}"
        )
    return stages // ranks


def split_at(modules: Sequence[str], points: Sequence[str]) -> StageSplit:
    """Stages that begin at the first module and at each of `points`. Raises SplitError."""
    names = list(modules)
    starts = [0]
    for point in points:
        if point not in names:
            nearest = difflib.get_close_matches(point, names, n=1, cutoff=0.0)
            raise SplitError(f"split point {point!r} is not a module of the model (nearest: {nearest[0]!r})")
        start = names.index(point)
        if start <= starts[-1]:
            previous = (
                repr(names[starts[-1]]) if len(starts) > 1 else "the first module, where stage 0 begins"
            )
            raise SplitError(f"split point {point!r} must come after {previous}: give each once, in order")
        starts.append(start)
    stages = tuple(tuple(names[start:stop]) for start, stop in pairwise([*starts, len(names)]))
    for index, stage in enumerate(stages):
        if not any(map(is_layer, stage)):
            raise SplitError(
                f"stage {index} would have no layer, only {', '.join(stage)}: every stage needs at least one"
            )
    return StageSplit(stages)


def split_by_layers(modules: Sequence[str], layers_per_stage: int) -> StageSplit:
    """Stages of `layers_per_stage` layers each; the last has what is left. Raises SplitError."""
    layers = [module for module in modules if is_layer(module)]
    if layers_per_stage < 1:
        raise SplitError(f"{layers_per_stage} layers per stage: at least 1 is needed")
    return split_at(modules, layers[layers_per_stage::layers_per_stage])


def split_balanced(modules: Sequence[str], costs: Sequence[float], stages: int) -> StageSplit:
    """The split whose dearest stage is as cheap as can be; among those, the most even one.

    Exact: a dynamic programme over (layers, stages) finds the least maximum, and a second one, within that
    maximum, the least sum of squares. What stands before the first layer belongs to stage 0 and what stands
    after the last layer to the last stage, and both are weighed.

    Args:
        modules: names in order of data flow.
        costs: the cost of each module, in any unit, none negative.
        stages: how many are wanted.

    Raises:
        SplitError: fewer than one stage, or more stages than layers.
    """
    layers = [position for position, module in enumerate(modules) if is_layer(module)]
    if not 1 <= stages <= len(layers):
        raise SplitError(
            f"{stages} stages for {len(layers)} layers: every stage needs at least one layer, "
            f"so there can be 1 to {len(layers)}"
        )
    weights = [float(costs[position]) for position in layers]
    weights[0] += sum(costs[: layers[0]])
    weights[-1] += sum(costs[layers[-1] + 1 :])
    least = _least_maximum(weights, stages)
    starts = _most_even(weights, stages, least)
    return split_at(modules, [modules[layers[start]] for start in starts[1:]])


def _least_maximum(weights: list[float], stages: int) -> float:
    prefix = _prefix_sums(weights)
    best = prefix[1:]  # best[j]: least maximum of the first j + 1 layers in the stages so far
    for stage in range(1, stages):
        best = [
            min(
                (max(best[k - 1], prefix[j + 1] - prefix[k]) for k in range(stage, j + 1)),
                default=math.inf,
            )
            for j in range(len(weights))
        ]
    return best[-1]


def _most_even(weights: list[float], stages: int, limit: float) -> list[int]:
    """The first layer of each stage: least sum of squares with no stage above `limit`."""
    prefix = _prefix_sums(weights)
    allowed = limit * (1 + 1e-12)
    best = [w * w if w <= allowed else math.inf for w in prefix[1:]]
    choices: list[list[int]] = []
    for stage in range(1, stages):
        following, choice = [math.inf] * len(weights), [0] * len(weights)
        for j in range(stage, len(weights)):
            for k in range(j, stage - 1, -1):
                cost = prefix[j + 1] - prefix[k]
                if cost > allowed:
                    break
                if best[k - 1] + cost * cost < following[j]:
                    following[j], choice[j] = best[k - 1] + cost * cost, k
        best = following
        choices.append(choice)
    starts, end = [], len(weights) - 1
    for choice in reversed(choices):
        starts.append(choice[end])
        end = choice[end] - 1
    return [0, *reversed(starts)]


def _prefix_sums(weights: list[float]) -> list[float]:
    sums = [0.0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    return sums
