"""ZB-H1 and ZB-H2: the backward in two parts, of which the gradients of the weights wait for the gaps.

4 ranks, 6 microbatches, f = b = w. ZB-H1:

    rank 0 | F0 F1 F2 F3          I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5
    rank 1 |    F0 F1 F2       I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5
    rank 2 |       F0 F1    I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5
    rank 3 |          F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5

It is 1F1B in which a W comes only r inputs later on rank r: the I, for which the rank before waits, goes
first, and the W fill the drain. Rank r holds p - r microbatches between F and I, and r more whose W is due:
p on every rank, as 1F1B does on its first. For f = b = w the step is at the bound of split backwards,
max((p-1)f + m(f+b+w), (p+m-1)(f+b) + w), for every m; the bubble of a rank is (p-1)(f+b-w).

ZB-H2 runs 2(p - r) - 1 forwards ahead and delays the W by 2r inputs. That takes the bubble of every rank down
to (p-1)(f+b-2w), which is nothing for f = b = w, and holds at most 2p - 1 microbatches. The wall clock of the
step still has the skew of the start. For few microbatches, and where w is long, so deep a warm-up is in the
way; then ZB-H1's order, being shorter, is taken.

Qi et al., "Zero Bubble Pipeline Parallelism", 2024 (arXiv 2401.10241), sections 2.1 and 2.2.
"""

from __future__ import annotations

from collections.abc import Sequence

from parallelisms.pipeline.actions import Action, ActionLists, Kind
from parallelisms.pipeline.schedules.family import ScheduleFamily
from parallelisms.pipeline.schedules.operations import step_of
from parallelisms.pipeline.setting import Setting


def zb_h1(setting: Setting) -> ActionLists:
    """The compute actions of each rank."""
    return tuple(
        _rank(setting, rank, warm_up=setting.ranks - 1 - rank, delay=rank) for rank in range(setting.ranks)
    )


def zb_h2(setting: Setting) -> ActionLists:
    """The compute actions of each rank; never a longer step than ZB-H1."""
    deep = tuple(
        _rank(setting, rank, warm_up=2 * (setting.ranks - 1 - rank), delay=2 * rank)
        for rank in range(setting.ranks)
    )
    return min(deep, zb_h1(setting), key=lambda lists: step_of(setting, lists))


def _rank(setting: Setting, rank: int, warm_up: int, delay: int) -> tuple[Action, ...]:
    forwards = [Action(rank, Kind.FORWARD, each) for each in range(setting.microbatches)]
    inputs = [Action(rank, Kind.BACKWARD_INPUT, each) for each in range(setting.microbatches)]
    return alternate_with_delayed_weights(forwards, inputs, warm_up, delay)


def alternate_with_delayed_weights(
    forwards: Sequence[Action], inputs: Sequence[Action], warm_up: int, delay: int
) -> tuple[Action, ...]:
    """`warm_up` forwards, then one forward and one I in turn, each W `delay` I after its own."""
    warm_up = min(warm_up, len(forwards))
    waiting = [Action(each.stage, Kind.BACKWARD_WEIGHT, each.microbatch) for each in inputs]
    actions = list(forwards[:warm_up])
    for position, backward in enumerate(inputs):
        actions += forwards[warm_up + position : warm_up + position + 1]
        actions.append(backward)
        if position >= delay:
            actions.append(waiting.pop(0))
    return (*actions, *waiting)


H1 = ScheduleFamily(
    name="ZB-H1",
    aliases=("ZBH1", "ZB1P", "ZeroBubble"),
    generate=zb_h1,
    single_stage=True,
    splits_backward=True,
    summary="1F1B with delayed weight gradients: a third of its bubble in the same memory",
)
H2 = ScheduleFamily(
    name="ZB-H2",
    aliases=("ZBH2", "ZB2P"),
    generate=zb_h2,
    single_stage=True,
    splits_backward=True,
    summary="no bubble on any rank if f = b = w; holds up to 2p - 1 microbatches",
)
FAMILIES = (H1, H2)
