"""Close the gaps of a schedule: shift everything right, then left, as far as dependencies and memory allow.

One pass takes the operations in the order of a given schedule and puts each where it can start first, also
into gaps between those already placed. Placed at the end of its rank's timeline, an operation starts no later
than in the given schedule, so a pass never makes it longer and never deadlocks. The same pass through the
mirrored graph, from the last operation to the first, makes everything as late as possible; what that moves
out of the way lets the next forward pass close more. Two passes are worth many random restarts ("double
justification", Valls, Ballestin and Quintanilla 2005, for project scheduling).

Memory is checked at insertion: between its forward and its weight gradient an activation is held. In the
mirrored graph the weight gradient takes it and the forward gives it back.

The building blocks of V-Half and V-Min, repeated and closed up in this way, are the schedules that their paper
gets by squeezing and reordering, or a little shorter.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace

from parallelisms.pipeline.actions import ActionLists
from parallelisms.pipeline.schedules.operations import (
    INPUT,
    WEIGHT,
    Operations,
    Timed,
    join_backwards,
    timed,
)
from parallelisms.pipeline.setting import Setting


def justify(operations: Operations, schedule: Timed, durations: Sequence[int], rounds: int = 4) -> Timed:
    """The schedule closed up, until a round gains nothing; never longer, within the same memory.

    The schedule must be within the memory of `operations`.
    """
    for _ in range(rounds):
        late = _pass(operations, _by_end(schedule, durations), durations, backwards=True)
        mirrored = [
            late.step - start - duration for start, duration in zip(late.starts, durations, strict=True)
        ]
        order = sorted(range(operations.count), key=mirrored.__getitem__)
        closed = _pass(operations, order, durations, backwards=False)
        gained = closed.step < schedule.step
        schedule = closed
        if not gained:
            break
    return schedule


def _by_end(schedule: Timed, durations: Sequence[int]) -> list[int]:
    ends = [-start - duration for start, duration in zip(schedule.starts, durations, strict=True)]
    return sorted(range(len(ends)), key=ends.__getitem__)


def _pass(
    operations: Operations, order: Sequence[int], durations: Sequence[int], *, backwards: bool
) -> Timed:
    """Place the operations in this order, each as early as it fits; `backwards` through the mirrored graph."""
    sources = operations.successors if backwards else operations.predecessors
    ranks = operations.ranks
    first_input, first_weight = operations.number(INPUT, 0, 0), operations.number(WEIGHT, 0, 0)
    direction = -1 if backwards else 1
    lines = [_Timeline(capacity) for capacity in operations.capacity]
    starts, ends = [0] * operations.count, [0] * operations.count
    for operation in order:
        ready = 0
        for source, delay in sources[operation]:
            arrival = ends[source] + delay
            if arrival > ready:
                ready = arrival
        taken = direction if operation < first_input else -direction if operation >= first_weight else 0
        duration = durations[operation]
        start = lines[ranks[operation]].place(ready, duration, taken)
        starts[operation], ends[operation] = start, start + duration
    return Timed(starts, max(line.ends[-1] for line in lines))


class _Timeline:
    """What one rank does: starts and ends in order, activations held after each, and the gaps between."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.held: list[int] = []
        self.gap_starts: list[int] = []
        self.gap_ends: list[int] = []

    def place(self, ready: int, duration: int, taken: int) -> int:
        """Put an operation at its first place from `ready` on; `taken`: activations it takes (-1: gives back)."""
        last = self.ends[-1] if self.ends else 0
        if ready + duration <= last:
            gap = self._find_gap(ready, duration, taken)
            if gap is not None:
                return self._insert(gap, ready, duration, taken)
        start = max(ready, last)
        if start > last:
            self.gap_starts.append(last)
            self.gap_ends.append(start)
        self.starts.append(start)
        self.ends.append(start + duration)
        self.held.append((self.held[-1] if self.held else 0) + taken)
        return start

    def _find_gap(self, ready: int, duration: int, taken: int) -> int | None:
        gap_starts, gap_ends = self.gap_starts, self.gap_ends
        gap = bisect_left(gap_ends, ready + duration)
        if taken > 0 and gap < len(gap_ends):
            # An activation taken in a gap is there until the end: only gaps after the last full moment do.
            held, capacity = self.held, self.capacity
            full = len(held) - 1
            while full >= 0 and held[full] < capacity:
                full -= 1
            if full >= 0:
                gap = max(gap, bisect_right(gap_starts, self.ends[full]))
        while gap < len(gap_ends):
            if max(ready, gap_starts[gap]) + duration <= gap_ends[gap]:
                return gap
            gap += 1
        return None

    def _insert(self, gap: int, ready: int, duration: int, taken: int) -> int:
        gap_start, gap_end = self.gap_starts[gap], self.gap_ends[gap]
        start = max(ready, gap_start)
        end = start + duration
        place = bisect_left(self.starts, gap_end)
        before = self.held[place - 1] if place else 0
        self.starts.insert(place, start)
        self.ends.insert(place, end)
        if taken:
            self.held[place:] = [before + taken, *(each + taken for each in self.held[place:])]
        else:
            self.held.insert(place, before)
        left = [(gap_start, start)] if start > gap_start else []
        left += [(end, gap_end)] if gap_end > end else []
        self.gap_starts[gap : gap + 1] = [each[0] for each in left]
        self.gap_ends[gap : gap + 1] = [each[1] for each in left]
        return start


def close_up(setting: Setting, lists: ActionLists, cap: float | None = None) -> ActionLists:
    """The lists with their gaps closed; I and W that follow each other become B where no one waits for I.

    Args:
        setting: the placement and costs for which gaps are closed.
        lists: compute actions, free of deadlock.
        cap: whole shares that a rank may hold, at least what the lists hold; None: as many as the rank that
            holds most in the lists.
    """
    operations = Operations.of(setting, cap)
    orders = operations.numbered(lists)
    if cap is None:
        operations = replace(operations, capacity=(max(operations.peaks(orders)),) * setting.ranks)
    schedule = justify(operations, timed(operations, orders, operations.durations), operations.durations)
    return join_backwards(operations, schedule)
