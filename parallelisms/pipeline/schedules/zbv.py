"""ZBV: zero bubble on a V. Two stages per rank, down and up again, so that a rank has the first and the last.

2 ranks (rank 0 has stages 0 and 3, rank 1 has 1 and 2), 5 microbatches, f = b = w:

    rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0F4 0I1 0W1 3F3 3I3 3W3 ...
    rank 1 |     1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1F4 1I2 ...

The turning point of the V needs no transfer, and the loss is on rank 0. Warm-up: rank r runs 2(p - r) - 1
forwards of its first stage, alternates both stages r times, then F I W of its second stage p - r times. Steady:
F I W of the first stage, F I W of the second. Drain: r pairs of I without W, for which the ranks above wait,
then p - r of I W, then the W that are left. Every rank is without bubble from its first start to its last end
for f = b = w and m >= 2p, with p microbatches held, as in 1F1B.

For fewer than 2p - 1 microbatches the pattern is made for 2p - 1, those that do not exist are left out, which
keeps it free of deadlock, and the holes are closed up.

Qi et al., "Zero Bubble Pipeline Parallelism", 2024 (arXiv 2401.10241), section 6.
"""

from __future__ import annotations

from itertools import count

from parallelisms.pipeline.actions import Action, ActionLists, Kind
from parallelisms.pipeline.schedules.family import ScheduleFamily
from parallelisms.pipeline.schedules.justification import close_up
from parallelisms.pipeline.setting import Setting


def zbv(setting: Setting) -> ActionLists:
    """The compute actions of each rank."""
    fewest = 2 * setting.ranks - 1
    if setting.microbatches >= fewest:
        return tuple(_rank(rank, setting.ranks, setting.microbatches) for rank in range(setting.ranks))
    pattern = (_rank(rank, setting.ranks, fewest) for rank in range(setting.ranks))
    return close_up(setting, tuple(without_surplus(actions, setting.microbatches) for actions in pattern))


def without_surplus(actions: tuple[Action, ...], microbatches: int) -> tuple[Action, ...]:
    """Only the first `microbatches` microbatches: what is left of an order free of deadlock is free of it."""
    return tuple(each for each in actions if each.microbatch is not None and each.microbatch < microbatches)


def _rank(rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    down, up = Chunk(rank), Chunk(2 * ranks - 1 - rank)
    actions: list[Action] = []
    for _ in range(2 * (ranks - rank) - 1):  # warm-up
        actions.append(down.forward())
    for _ in range(rank):
        actions += (up.forward(), down.forward())
    for _ in range(ranks - rank):
        actions += (up.forward(), up.input(), up.weight())
    for step in range(microbatches - ranks):  # steady
        if step < microbatches - (2 * ranks - 1 - rank):
            actions.append(down.forward())
        actions += (down.input(), down.weight(), up.forward(), up.input(), up.weight())
    for _ in range(rank):  # drain
        actions += (down.input(), up.input())
    for _ in range(ranks - rank):
        actions += (down.input(), down.weight())
    actions += [up.weight() for _ in range(rank)]
    actions += [down.weight() for _ in range(rank)]
    return tuple(actions)


class Chunk:
    """One stage of a rank: every call gives the action of the next microbatch."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._forwards, self._inputs, self._weights = count(), count(), count()

    def forward(self) -> Action:
        return Action(self._stage, Kind.FORWARD, next(self._forwards))

    def input(self) -> Action:
        return Action(self._stage, Kind.BACKWARD_INPUT, next(self._inputs))

    def weight(self) -> Action:
        return Action(self._stage, Kind.BACKWARD_WEIGHT, next(self._weights))

    def backward(self) -> Action:
        """Both parts at once; all W of the I before must have been taken."""
        next(self._weights)
        return Action(self._stage, Kind.BACKWARD, next(self._inputs))


FAMILY = ScheduleFamily(
    name="ZBVZeroBubble",
    aliases=("ZBV", "ZB-V"),
    generate=zbv,
    placement="v",
    splits_backward=True,
    summary="no bubble on any rank if f = b = w and m >= 2p, in the memory of 1F1B",
)
