"""V-Half and V-Min: half and a third of the activations of 1F1B, on a V.

4 ranks, 4 microbatches, f = b = w. V-Half (rank r has stages r and 7 - r; at most 3 microbatches are held):

    rank 0 | 0F0 0F1 0F2 0F3             7F0 7I0 7F1 7I1 7W0 7W1 7F2 7B2~~~~ 0B0~~~~     7F3 7I3 0B1~~~~ ...
    rank 1 |     1F0 1F1 1F2 1F3     6F0     6F1 6I0 6W0 6I1 6F2 6W1     1I0 1W0 6I2 6F3 6W2 1I1 6I3 1W1 ...
    rank 2 |         2F0 2F1 2F2 5F0     5F1     5F2 5I0 5W0 2F3 5I1 2I0 2W0 5W1 5F3 5I2 2I1 2W1 5W2 5I3 ...
    rank 3 |             3F0 4F0 3F1 4F1 3F2 4F2         4B0~~~~ 3I0 3W0 3F3 4F3 4I1 3I1 4W1 3W1 4I2 3I2 ...

V-Min (at most 2 are held):

    rank 0 | 0F0 0F1 0F2                 7F0 7I0 7W0 7F1 7I1 7W1 0F3     0B0~~~~         7F2 7I2 7W2 0B1 ...
    rank 1 |     1F0 1F1             6F0     6F1 6I0 6W0 1F2 6B1~~~~ 1I0 1W0 1F3     6F2     1I1 6I2 1W1 ...
    rank 2 |         2F0 2F1     5F0     5F1         5I0 5W0 2F2 2I0 2W0 5B1~~~~ 5F2 2F3 2I1 2W1     5I2 ...
    rank 3 |             3F0 4F0 3F1 4F1                 4I0 3I0 4W0 3W0 3F2 4F2 4I1 3I1 4W1 3W1 3F3 4F3 ...

An activation is held from its forward to the end of its backward. On a V every rank has one stage where that
is long and one where it is short, so that all ranks hold about the same. A *building block* is the way of one
microbatch through all ranks, with offsets such that the block can be repeated every 6 units (F, I, W of two
stages) without two things at once on a rank. The shorter a block's stay on a rank, the less the rank holds:

- V-Min takes one unit for each hop. It holds (p + 4) // 3 microbatches, a third of what 1F1B does.
- V-Half takes two units for each hop down the V, for forwards and for backwards. It holds p // 2 + 1
  microbatches, half of what 1F1B does, and what it waits for has more time to arrive.

Where the offsets would meet modulo 6, which depends on p, the second half of the block starts a few units
later. W go into the first free units. The repeated blocks are closed up, for the costs of the setting and
within the memory named above. For f = b = w the bubble of a rank is then less than half of that of 1F1B for
V-Half, at most two thirds for V-Min. Where the costs are far from equal, V-Min's steady state has gaps.

Qi et al., "Pipeline Parallelism with Controllable Memory", 2024 (arXiv 2405.15362), sections 3 and 4.
"""

from __future__ import annotations

from dataclasses import dataclass

from parallelisms.pipeline.actions import Action, ActionLists, Kind
from parallelisms.pipeline.schedules.family import ScheduleFamily
from parallelisms.pipeline.schedules.justification import close_up
from parallelisms.pipeline.setting import Setting

_PERIOD = 6  # F, I and W of two stages, each one unit


@dataclass(frozen=True)
class Block:
    """When one rank works on microbatch 0, in units: on its first stage (down) and its second (up)."""

    forward_down: int
    forward_up: int
    input_up: int
    input_down: int


def half_block(rank: int, ranks: int) -> Block:
    """V-Half's building block on one rank."""
    shift = 3 if ranks % 2 == 0 else 0
    return Block(
        forward_down=2 * rank,
        forward_up=3 * ranks - rank - 2,
        input_up=3 * ranks + 2 * rank - 1 + shift,
        input_down=6 * ranks - rank - 2 + shift,
    )


def min_block(rank: int, ranks: int) -> Block:
    """V-Min's building block on one rank."""
    shift = 2 if ranks % 3 == 0 else 0
    return Block(
        forward_down=rank,
        forward_up=2 * ranks - rank - 1,
        input_up=2 * ranks + rank + shift,
        input_down=4 * ranks - rank - 1 + shift,
    )


def v_half(setting: Setting) -> ActionLists:
    """The compute actions of each rank; at most p // 2 + 1 microbatches are held."""
    ranks = setting.ranks
    lists = tuple(_repeat(half_block(rank, ranks), rank, setting) for rank in range(ranks))
    return close_up(setting, lists, cap=ranks // 2 + 1)


def v_min(setting: Setting) -> ActionLists:
    """The compute actions of each rank; at most (p + 4) // 3 microbatches are held."""
    ranks = setting.ranks
    lists = tuple(_repeat(min_block(rank, ranks), rank, setting) for rank in range(ranks))
    return close_up(setting, lists, cap=(ranks + 4) // 3)


def _repeat(block: Block, rank: int, setting: Setting) -> tuple[Action, ...]:
    """The block of every microbatch, one period after the other, with each W in the first free unit."""
    down, up = rank, setting.stages - 1 - rank
    slots: dict[int, Action] = {}
    for each in range(setting.microbatches):
        start = _PERIOD * each
        slots[start + block.forward_down] = Action(down, Kind.FORWARD, each)
        slots[start + block.forward_up] = Action(up, Kind.FORWARD, each)
        slots[start + block.input_up] = Action(up, Kind.BACKWARD_INPUT, each)
        slots[start + block.input_down] = Action(down, Kind.BACKWARD_INPUT, each)
    actions: list[Action] = []
    waiting: list[Action] = []
    for time in range(max(slots) + 1):
        if time in slots:
            actions.append(slots[time])
            if slots[time].kind is Kind.BACKWARD_INPUT:
                waiting.append(Action(slots[time].stage, Kind.BACKWARD_WEIGHT, slots[time].microbatch))
        elif waiting:
            actions.append(waiting.pop(0))
    return (*actions, *waiting)


HALF = ScheduleFamily(
    name="V-Half",
    aliases=("VHalf",),
    generate=v_half,
    placement="v",
    splits_backward=True,
    summary="half the activations of 1F1B and less than half its bubble",
)
MIN = ScheduleFamily(
    name="V-Min",
    aliases=("VMin",),
    generate=v_min,
    placement="v",
    splits_backward=True,
    summary="a third of the activations of 1F1B and about half its bubble, if f = b = w",
)
FAMILIES = (HALF, MIN)
