"""What Auto looks at: greedy schedules by many rules, and shaken copies of the best.

All of it is deterministic, and its amount is counted in operations, not in time, so that every rank comes to
the same schedule.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from parallelisms.pipeline.schedules.justification import justify
from parallelisms.pipeline.schedules.list_scheduling import Rules, list_schedule
from parallelisms.pipeline.schedules.operations import FORWARD, INPUT, WEIGHT, Operations, Timed, timed


class Manner(Enum):
    """What goes first when a rank can choose."""

    FORWARDS = "forwards of the deepest stage, then input gradients, then weight gradients"
    BACKWARDS = "input gradients, then forwards of the deepest stage, then weight gradients"
    DUE = "what has the least time until it is due, then weight gradients"
    DUE_ALL = "what has the least time until it is due"


@dataclass(frozen=True)
class Greedy:
    """A rule for the list scheduler; `pace` is in units of the busiest rank's work on one microbatch."""

    manner: Manner
    pace: float
    patience: float


# In 60 random settings (4 to 8 ranks, all placements, caps of 0.4 to 1 times p, even and uneven stages) these
# of 216 rules, in this order, add most to the best of those before. The first comes within 4% of the best of
# all 216 on average, four within 1%, all twelve within 0.2%.
_RULES = (
    Greedy(Manner.FORWARDS, 0.8, 0.0),
    Greedy(Manner.FORWARDS, 1.5, 0.0),
    Greedy(Manner.DUE, 0.0, 0.0),
    Greedy(Manner.DUE, 1.1, 0.0),
    Greedy(Manner.BACKWARDS, 0.9, 0.5),
    Greedy(Manner.DUE_ALL, 0.8, 0.0),
    Greedy(Manner.FORWARDS, 0.8, 0.5),
    Greedy(Manner.DUE, 1.1, 0.5),
    Greedy(Manner.BACKWARDS, 0.0, 0.5),
    Greedy(Manner.FORWARDS, 0.0, 0.0),
    Greedy(Manner.BACKWARDS, 0.8, 0.0),
    Greedy(Manner.FORWARDS, 1.5, 1.0),
)


def greedy_schedules(operations: Operations, rules: int) -> Iterator[Timed]:
    """Closed-up greedy schedules by the first so many rules, of which there are twelve."""
    busiest = max(_work(operations)) // operations.microbatches
    tails = _tails(operations)
    for rule in _RULES[:rules]:
        priority = _priority(operations, rule.manner, busiest, tails)
        schedule = list_schedule(operations, Rules(priority, rule.patience, int(rule.pace * busiest)))
        yield justify(operations, schedule, operations.durations)


def shake(operations: Operations, schedule: Timed, budget: int, goal: int) -> Timed:
    """The best schedule found around `schedule`; about `budget` operations are shaken.

    Again and again the times of all operations are made a little wrong, the schedule is closed up for those,
    and the order that this gives is closed up for the true times. It is kept if the step has not become
    longer ("noising", Charon and Hudry 1993). No order met on the way exceeds the memory or deadlocks. Ends
    early when a step of `goal` is reached.
    """
    chance = random.Random(0)
    best = current = schedule
    for turn in range(budget // operations.count):
        if best.step <= goal:
            break
        strength = 0.06 * (1 + turn % 4)
        wrong = [
            max(1, round(time * (1 + strength * (2 * chance.random() - 1)))) for time in operations.durations
        ]
        moved = justify(operations, timed(operations, operations.orders(current.starts), wrong), wrong, 1)
        again = timed(operations, operations.orders(moved.starts), operations.durations)
        again = justify(operations, again, operations.durations, 3)
        if again.step <= current.step:
            current = again
        if again.step < best.step:
            best = again
    return best


def _work(operations: Operations) -> list[int]:
    """All that each rank has to do."""
    work = [0] * operations.setting.ranks
    for rank, duration in zip(operations.ranks, operations.durations, strict=True):
        work[rank] += duration
    return work


def _tails(operations: Operations) -> list[int]:
    """For each row (kind and stage): from its start to the end of all that follows from it."""
    m, stages = operations.microbatches, operations.stages
    tails = [0] * (3 * stages)
    rows = [WEIGHT * stages + stage for stage in range(stages)]
    rows += [INPUT * stages + stage for stage in range(stages)]
    rows += [FORWARD * stages + stage for stage in reversed(range(stages))]
    for row in rows:
        after = [tails[waiting // m] + delay for waiting, delay in operations.successors[row * m]]
        tails[row] = operations.durations[row * m] + max(after, default=0)
    return tails


def _priority(operations: Operations, manner: Manner, busiest: int, tails: list[int]) -> list[int]:
    """A number for every operation; smaller goes first."""
    m, last = operations.microbatches, operations.microbatches * busiest + max(tails)
    priority = []
    for row, tail in enumerate(tails):
        kind, stage = divmod(row, operations.stages)
        for microbatch in range(m):
            due = microbatch * busiest - tail
            if manner is Manner.DUE_ALL:
                rank = due
            elif kind == WEIGHT:
                rank = 3 * last + due
            elif manner is Manner.DUE:
                rank = due
            elif kind == INPUT:
                rank = microbatch
            else:
                # Deeper stages first, in a stage older microbatches first.
                rank = (operations.stages - stage) * m + microbatch
                rank += -2 * last if manner is Manner.FORWARDS else last
            priority.append(rank)
    return priority
