"""Interleaved 1F1B: several stages (chunks) per rank, so that the pipeline fills v times faster.

2 ranks, 2 stages each (rank 0 has stages 0 and 2), 4 microbatches in groups of 2; `2F0` is stage 2's forward
of microbatch 0, a backward lasts as long as two forwards:

    rank 0 | 0F0 0F1 2F0 2F1 0F2     2B0~~~~ 0F3 2B1~~~~ 2F2 0B0~~~~ 2F3 0B1~~~~     2B2~~~~     2B3~~~~ 0B2~~~~ 0B3~~~~
    rank 1 |     1F0 1F1 3F0 3B0~~~~ 3F1 3B1~~~~ 1F2 1B0~~~~ 1F3 1B1~~~~ 3F2 3B2~~~~ 3F3 3B3~~~~ 1B2~~~~ 1B3~~~~

Microbatches go through all chunks of a rank in groups: a group's forwards on chunk 0, on chunk 1, and so on;
then the next group. Backwards do the same from the last chunk. Groups of exactly p, as they are usually
drawn, leave a short last group when p does not divide m, and that deadlocks. Here there are max(1, m // p)
groups whose sizes are as equal as possible, and rank r runs 2(p - 1 - r) + (v - 1) * (largest group)
forwards before it alternates: that completes for every m, at the lower bound of unsplit looped schedules
for equal stages, (f + B)(max(m, p) + (min(m, p) - 1)/v). With one stage per rank it is 1F1B.

Rank 0 holds p + (p - 1)/v microbatches' activations when p divides m, up to about half more when it does not.
Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021,
section 2.2.2.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from parallelisms.pipeline.actions import Action, ActionLists, Kind
from parallelisms.pipeline.schedules.family import ScheduleFamily
from parallelisms.pipeline.schedules.one_f_one_b import alternate, one_f_one_b
from parallelisms.pipeline.setting import Setting


def interleaved_1f1b(setting: Setting) -> ActionLists:
    """The compute actions of each rank."""
    if setting.stages_per_rank == 1:
        return one_f_one_b(setting)
    groups = equal_groups(setting.microbatches, max(1, setting.microbatches // setting.ranks))
    return tuple(_rank(rank, setting, groups) for rank in range(setting.ranks))


def equal_groups(microbatches: int, groups: int) -> list[range]:
    """`groups` runs of consecutive microbatches whose sizes differ by at most one, larger ones first."""
    size, larger = divmod(microbatches, groups)
    starts = [group * size + min(group, larger) for group in range(groups + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def _rank(rank: int, setting: Setting, groups: list[range]) -> tuple[Action, ...]:
    ranks = setting.ranks
    stages = setting.placement.stages_of(rank)
    forwards = _by_groups(Kind.FORWARD, groups, stages)
    backwards = _by_groups(Kind.BACKWARD, groups, tuple(reversed(stages)))
    warm_up = 2 * (ranks - 1 - rank) + (len(stages) - 1) * len(groups[0])
    return alternate(forwards, backwards, warm_up=min(warm_up, len(forwards)))


def _by_groups(kind: Kind, groups: Iterable[range], stages: tuple[int, ...]) -> list[Action]:
    return [Action(stage, kind, microbatch) for group in groups for stage in stages for microbatch in group]


FAMILY = ScheduleFamily(
    name="Interleaved1F1B",
    aliases=("Interleaved",),
    generate=interleaved_1f1b,
    summary="1F1B with several stages per rank: the fill and the drain are v times shorter",
)
