"""A greedy list scheduler: schedules for any placement, any costs and any memory cap.

Given a priority for every operation, it runs the pipeline forward in time (Giffler and Thompson 1960): of the
operations whose dependencies are scheduled, take the rank on which one could end first, and on that rank let
the operation of highest priority go next. Qi et al. 2024 (arXiv 2401.10241, section 3.1) find their schedules
in the same manner.

**It never deadlocks, whatever the priorities.** Activations are the only resource that can run out. Let k be
the oldest microbatch whose forwards on a rank are not all scheduled. A forward of a microbatch after k is
admitted only if all activations of microbatches after k then fit into the cap less one whole share. So the
oldest unfinished microbatch always finds room for all its stages on every rank, can be carried through to its
last weight gradient, and gives its memory back: the banker's algorithm (Dijkstra 1965) with the microbatches
as customers. A cap of one whole share is therefore always enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallelisms.pipeline.schedules.operations import FORWARD, INPUT, WEIGHT, Operations, Timed

_NEVER = 1 << 60


@dataclass(frozen=True)
class Rules:
    """How the scheduler chooses.

    Attributes:
        priority: of each operation; smaller goes first.
        patience: a rank waits for an operation of higher priority that begins within this fraction of the
            time until its first possible operation would end. 0 never waits for anything, 1 always.
        pace: microbatch k enters the pipeline no earlier than k times this, in ticks. What enters too early
            only fills the memory.
    """

    priority: Sequence[int]
    patience: float = 0.0
    pace: int = 0


def list_schedule(operations: Operations, rules: Rules) -> Timed:
    """Schedule everything by the rules: complete, within the memory, free of deadlock."""
    run = _Run(operations, rules)
    ranks = range(operations.setting.ranks)
    for rank in ranks:
        run.look(rank)
    for _ in range(operations.count):
        run.carry_out(min(ranks, key=run.first_end.__getitem__))
    return Timed(run.starts, max(run.free))


class _Run:
    """The state of one pass. A row is a kind on a stage; in it microbatches go in order."""

    def __init__(self, operations: Operations, rules: Rules) -> None:
        ranks, stages, m = operations.setting.ranks, operations.stages, operations.microbatches
        self.operations = operations
        self.rules = rules
        self.starts = [0] * operations.count
        self.free = [0] * ranks
        self.held = [0] * ranks
        self.next = [0] * (3 * stages)
        self.arrival = [_NEVER] * operations.count  # when the input of an operation is there
        self.arrival[:m] = range(0, m * rules.pace, rules.pace) if rules.pace else [0] * m
        self.rows = [
            [kind * stages + stage for kind in (INPUT, FORWARD, WEIGHT) for stage in mine]
            for mine in operations.stages_of
        ]
        self.first_end = [_NEVER] * ranks
        self.chosen = [-1] * ranks

    def look(self, rank: int) -> None:
        """Find what the rank would do next, and when its first possible operation would end."""
        operations, priority, arrival = self.operations, self.rules.priority, self.arrival
        now, durations, m = self.free[rank], operations.durations, operations.microbatches
        forwards = operations.stages
        candidates = []
        first_start = first_end = _NEVER
        for row in self.rows[rank]:
            microbatch = self.next[row]
            operation = row * m + microbatch
            if microbatch == m or arrival[operation] == _NEVER:
                continue
            if row < forwards and not self._has_room(rank, microbatch):
                continue
            start = max(arrival[operation], now)
            candidates.append((priority[operation], start, operation))
            first_start = min(first_start, start)
            first_end = min(first_end, start + durations[operation])
        self.first_end[rank] = first_end
        if candidates:
            latest = first_start + int(self.rules.patience * (first_end - first_start))
            self.chosen[rank] = min(each for each in candidates if each[1] <= latest)[2]

    def carry_out(self, rank: int) -> None:
        """Schedule the rank's choice, and tell whoever waits for its result."""
        operations, operation = self.operations, self.chosen[rank]
        row = operation // operations.microbatches
        self.next[row] += 1
        start = max(self.arrival[operation], self.free[rank])
        end = start + operations.durations[operation]
        self.starts[operation] = start
        self.free[rank] = end
        kind = row // operations.stages
        self.held[rank] += (kind == FORWARD) - (kind == WEIGHT)
        self.look(rank)
        for waiting, delay in operations.successors[operation]:
            self.arrival[waiting] = end + delay
            self.look(operations.ranks[waiting])

    def _has_room(self, rank: int, microbatch: int) -> bool:
        """Whether the rank may forward `microbatch` now; see the module's docstring."""
        capacity = self.operations.capacity[rank]
        if self.held[rank] >= capacity:
            return False
        mine = self.operations.stages_of[rank]
        oldest = self.next[mine[-1]]
        if microbatch == oldest:
            return True
        ahead = 1
        for stage in mine:
            ahead += max(self.next[stage] - oldest - 1, 0)
        return ahead <= capacity - len(mine)
