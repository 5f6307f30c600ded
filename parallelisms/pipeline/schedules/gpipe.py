"""GPipe: all forwards, then all backwards.

4 ranks, 4 microbatches, a backward as long as two forwards:

    rank 0 | F0 F1 F2 F3                            B0~~~ B1~~~ B2~~~ B3~~~
    rank 1 |    F0 F1 F2 F3                   B0~~~ B1~~~ B2~~~ B3~~~
    rank 2 |       F0 F1 F2 F3          B0~~~ B1~~~ B2~~~ B3~~~
    rank 3 |          F0 F1 F2 F3 B0~~~ B1~~~ B2~~~ B3~~~

The step takes (m + p - 1)(f + B): the lower bound without splitting the backward. Every rank holds all m
activations. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
2019, section 2.
"""

from __future__ import annotations

from parallelisms.pipeline.actions import Action, ActionLists, Kind
from parallelisms.pipeline.schedules.family import ScheduleFamily
from parallelisms.pipeline.setting import Setting


def gpipe(setting: Setting) -> ActionLists:
    """The compute actions of each rank: m forwards, then m backwards in the same order."""
    return tuple(
        tuple(
            Action(stage, kind, microbatch)
            for kind in (Kind.FORWARD, Kind.BACKWARD)
            for microbatch in range(setting.microbatches)
        )
        for stage in range(setting.ranks)
    )


FAMILY = ScheduleFamily(
    name="GPipe",
    generate=gpipe,
    single_stage=True,
    summary="all forwards, then all backwards; holds every microbatch",
)
