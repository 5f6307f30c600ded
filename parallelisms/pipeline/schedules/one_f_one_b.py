"""1F1B (PipeDream-Flush): as few forwards ahead as keep the pipeline full, then one backward per forward.

4 ranks, 6 microbatches, a backward as long as two forwards:

    rank 0 | F0 F1 F2 F3                   B0~~~ F4 B1~~~ F5 B2~~~    B3~~~    B4~~~    B5~~~
    rank 1 |    F0 F1 F2             B0~~~ F3 B1~~~ F4 B2~~~ F5 B3~~~    B4~~~    B5~~~
    rank 2 |       F0 F1       B0~~~ F2 B1~~~ F3 B2~~~ F4 B3~~~ F5 B4~~~    B5~~~
    rank 3 |          F0 B0~~~ F1 B1~~~ F2 B2~~~ F3 B3~~~ F4 B4~~~ F5 B5~~~

Rank r runs p - 1 - r forwards before it alternates. With fewer microbatches than that, it runs all of them
first: no special case is needed, for sends never wait for anything. The step takes (m + p - 1)(f + B), the
lower bound without splitting the backward, and rank r holds min(p - r, m) activations.
Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-2BW), 2021, section 3.2, and
"Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021, section 2.2.1.
"""

from __future__ import annotations

from parallelisms.pipeline.actions import Action, ActionLists, Kind
from parallelisms.pipeline.schedules.family import ScheduleFamily
from parallelisms.pipeline.setting import Setting


def one_f_one_b(setting: Setting) -> ActionLists:
    """The compute actions of each rank."""
    return tuple(_rank(rank, setting.ranks, setting.microbatches) for rank in range(setting.ranks))


def _rank(rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    forwards = [Action(rank, Kind.FORWARD, microbatch) for microbatch in range(microbatches)]
    backwards = [Action(rank, Kind.BACKWARD, microbatch) for microbatch in range(microbatches)]
    return alternate(forwards, backwards, warm_up=min(ranks - 1 - rank, microbatches))


def alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> tuple[Action, ...]:
    """`warm_up` forwards, then one forward and one backward in turn, then the backwards that are left."""
    actions = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        actions += (forward, backward)
    actions += backwards[len(forwards) - warm_up :]
    return tuple(actions)


FAMILY = ScheduleFamily(
    name="1F1B",
    aliases=("OneFOneB", "PipeDream-Flush"),
    generate=one_f_one_b,
    single_stage=True,
    summary="one forward, one backward; holds at most p microbatches",
)
