"""Looped BFS: several stages per rank, all microbatches through one chunk before the next chunk.

2 ranks, 2 stages each (rank 0 has stages 0 and 2), 3 microbatches, a backward as long as two forwards:

    rank 0 | 0F0 0F1 0F2 2F0 2F1 2F2             2B0~~~~ 2B1~~~~ 2B2~~~~ 0B0~~~~ 0B1~~~~ 0B2~~~~
    rank 1 |     1F0 1F1 1F2 3F0 3F1 3F2 3B0~~~~ 3B1~~~~ 3B2~~~~ 1B0~~~~ 1B1~~~~ 1B2~~~~

Breadth first: each stage's parameters are gathered once and its gradients are complete as early as can be,
which hides the communication of sharded data parallelism. At the lower bound of unsplit looped schedules for
equal stages, (f + B)(max(m, p) + (min(m, p) - 1)/v); every rank holds all m activations. With one stage per
rank it is GPipe. Lamy-Poirier, "Breadth-First Pipeline Parallelism", 2023, section 4.
"""

from __future__ import annotations

from parallelisms.pipeline.actions import Action, ActionLists, Kind
from parallelisms.pipeline.schedules.family import ScheduleFamily
from parallelisms.pipeline.setting import Setting


def looped_bfs(setting: Setting) -> ActionLists:
    """The compute actions of each rank."""
    return tuple(_rank(setting, rank) for rank in range(setting.ranks))


def _rank(setting: Setting, rank: int) -> tuple[Action, ...]:
    stages = setting.placement.stages_of(rank)
    microbatches = range(setting.microbatches)
    forwards = tuple(Action(stage, Kind.FORWARD, each) for stage in stages for each in microbatches)
    backwards = tuple(
        Action(stage, Kind.BACKWARD, each) for stage in reversed(stages) for each in microbatches
    )
    return forwards + backwards


FAMILY = ScheduleFamily(
    name="LoopedBFS",
    aliases=("BreadthFirst", "BFS"),
    generate=looped_bfs,
    summary="breadth first over several stages per rank; holds every microbatch",
)
