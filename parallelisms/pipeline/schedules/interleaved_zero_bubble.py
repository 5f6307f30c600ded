"""Interleaved zero bubble: ZB-H1 with several stages per rank.

2 ranks, 2 stages each (rank 0 has stages 0 and 2), 4 microbatches, f = b = w:

    rank 0 | 0F0 0F1 2F0 2F1     2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0 2F2 0I1 0W1 2F3 2I2 2W2 2I3 2W3 0I2 0W2 0I3 0W3
    rank 1 |     1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 1F3 1I1 1W0 3F2 3I2 1W1 3F3 3I3 3W2 1I2 3W3 1I3 1W2 1W3

Forwards and backwards come in the order of interleaved 1F1B, in max(1, m // p) groups as equal as can be, so
every number of microbatches works. The warm-up is half as deep, p - 1 - r instead of 2(p - 1 - r) forwards
beyond the first round, for an I is back in less time than a whole backward; and a W comes r inputs after its
own. For f = b = w and m >= p the step is at its bound, (p-1)f/v + m(f+b+w).

Where the number of groups divides m, this is the list of torch's ScheduleInterleavedZeroBubble. Qi et al.,
"Zero Bubble Pipeline Parallelism", 2024 (arXiv 2401.10241), and Narayanan et al. 2021, section 2.2.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from parallelisms.pipeline.actions import Action, ActionLists, Kind
from parallelisms.pipeline.schedules.family import ScheduleFamily
from parallelisms.pipeline.schedules.interleaved import equal_groups
from parallelisms.pipeline.schedules.zero_bubble import alternate_with_delayed_weights
from parallelisms.pipeline.setting import Setting


def interleaved_zero_bubble(setting: Setting) -> ActionLists:
    """The compute actions of each rank."""
    groups = equal_groups(setting.microbatches, max(1, setting.microbatches // setting.ranks))
    return tuple(_rank(setting, rank, groups) for rank in range(setting.ranks))


def _rank(setting: Setting, rank: int, groups: Sequence[range]) -> tuple[Action, ...]:
    stages = setting.placement.stages_of(rank)
    forwards = _by_groups(Kind.FORWARD, groups, stages)
    inputs = _by_groups(Kind.BACKWARD_INPUT, groups, tuple(reversed(stages)))
    warm_up = (len(stages) - 1) * len(groups[0]) + setting.ranks - 1 - rank
    return alternate_with_delayed_weights(forwards, inputs, warm_up, delay=rank)


def _by_groups(kind: Kind, groups: Iterable[range], stages: tuple[int, ...]) -> list[Action]:
    return [Action(stage, kind, microbatch) for group in groups for stage in stages for microbatch in group]


FAMILY = ScheduleFamily(
    name="InterleavedZeroBubble",
    aliases=("InterleavedZB",),
    generate=interleaved_zero_bubble,
    splits_backward=True,
    summary="ZB-H1 with several stages per rank: the fill is v times shorter",
)
