"""A setting as the searching schedules (V-Half, V-Min, Auto) see it: numbered operations with integer times.

Every backward is split, for that never makes a step longer: the gradient of the inputs leaves earlier, and the
gradient of the weights may still follow at once. `join_backwards` undoes it where nothing is gained by it.
An operation is the number `(kind * stages + stage) * microbatches + microbatch`, because the search looks at
millions of them. Times are integers, at least one tick, so that orders by time are exact and have no ties
between an operation and what it depends on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from parallelisms.pipeline.actions import Action, ActionLists, Kind
from parallelisms.pipeline.setting import Setting

FORWARD, INPUT, WEIGHT = range(3)
_KINDS = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}
# The longest operation; small enough that sums are exact, fine enough that rounding does not show.
_LONGEST = 1_000_000

# Of an operation: those next to it in the graph, each with the time of the message between them.
Neighbours = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Timed:
    """A schedule: the start of every operation, and the end of the last."""

    starts: list[int]
    step: int


@dataclass(frozen=True)
class Operations:
    """The operations of a setting. `capacity[rank]`: activations, of one microbatch on one stage, it may hold."""

    setting: Setting
    capacity: tuple[int, ...]

    @classmethod
    def of(cls, setting: Setting, cap: float | None = None) -> Operations:
        """`cap` in whole shares of a rank, None for no limit; one share is the least that any schedule needs."""
        sizes = [len(setting.placement.stages_of(rank)) for rank in range(setting.ranks)]
        all_of_them = [size * setting.microbatches for size in sizes]
        if cap is None:
            return cls(setting, tuple(all_of_them))
        allowed = [max(size, int(size * cap + 1e-9)) for size in sizes]
        return cls(setting, tuple(map(min, allowed, all_of_them)))

    @cached_property
    def stages(self) -> int:
        return self.setting.stages

    @cached_property
    def microbatches(self) -> int:
        return self.setting.microbatches

    @cached_property
    def count(self) -> int:
        return 3 * self.stages * self.microbatches

    @cached_property
    def owners(self) -> tuple[int, ...]:
        return self.setting.placement.owners

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        return tuple(self.setting.placement.stages_of(rank) for rank in range(self.setting.ranks))

    @cached_property
    def durations(self) -> list[int]:
        """Of every operation, in ticks."""
        costs = self.setting.costs
        times = costs.forward + costs.backward_input + costs.backward_weight
        return [self._ticks(time) for time in times for _ in range(self.microbatches)]

    @cached_property
    def ranks(self) -> list[int]:
        """The rank of every operation."""
        return [
            self.owners[row % self.stages] for row in range(3 * self.stages) for _ in range(self.microbatches)
        ]

    @cached_property
    def latency(self) -> list[int]:
        """Of a message between stages s and s + 1, in ticks; zero within a rank."""
        transfer = self.setting.costs.transfer
        ticks = self._ticks(transfer) if transfer > 0 else 0
        return [
            0 if here == there else ticks for here, there in zip(self.owners, self.owners[1:], strict=False)
        ]

    @cached_property
    def predecessors(self) -> list[Neighbours]:
        """What every operation waits for, beside the one before it on its rank."""
        result: list[Neighbours] = []
        for kind in range(3):
            for stage in range(self.stages):
                source, delay = self._source(kind, stage)
                for microbatch in range(self.microbatches):
                    result.append(() if source is None else ((source + microbatch, delay),))
        return result

    @cached_property
    def successors(self) -> list[Neighbours]:
        """What waits for every operation."""
        result: list[list[tuple[int, int]]] = [[] for _ in range(self.count)]
        for operation, sources in enumerate(self.predecessors):
            for source, delay in sources:
                result[source].append((operation, delay))
        return [tuple(each) for each in result]

    def number(self, kind: int, stage: int, microbatch: int) -> int:
        return (kind * self.stages + stage) * self.microbatches + microbatch

    def orders(self, starts: Sequence[int]) -> list[list[int]]:
        """The operations of each rank by their starts."""
        orders: list[list[int]] = [[] for _ in range(self.setting.ranks)]
        for operation in sorted(range(self.count), key=starts.__getitem__):
            orders[self.ranks[operation]].append(operation)
        return orders

    def numbered(self, lists: ActionLists) -> list[list[int]]:
        """Compute actions as operations; a whole backward becomes its two halves."""
        return [[number for action in actions for number in self._numbers(action)] for actions in lists]

    def actions(self, orders: Sequence[Sequence[int]]) -> ActionLists:
        """Operations as action lists."""
        return tuple(tuple(self._action(operation) for operation in order) for order in orders)

    def peaks(self, orders: Sequence[Sequence[int]]) -> list[int]:
        """The most activations that each rank holds at once."""
        inputs, weights = self.number(INPUT, 0, 0), self.number(WEIGHT, 0, 0)
        peaks = []
        for order in orders:
            held = peak = 0
            for operation in order:
                held += (operation < inputs) - (operation >= weights)
                peak = max(peak, held)
            peaks.append(peak)
        return peaks

    def fits(self, orders: Sequence[Sequence[int]]) -> bool:
        """Whether no rank ever holds more activations than its capacity."""
        return all(peak <= most for peak, most in zip(self.peaks(orders), self.capacity, strict=True))

    def _source(self, kind: int, stage: int) -> tuple[int | None, int]:
        if kind == FORWARD:
            return (self.number(kind, stage - 1, 0), self.latency[stage - 1]) if stage > 0 else (None, 0)
        if kind == WEIGHT:
            return self.number(INPUT, stage, 0), 0
        if stage + 1 < self.stages:
            return self.number(kind, stage + 1, 0), self.latency[stage]
        return self.number(FORWARD, stage, 0), 0

    @cached_property
    def unit(self) -> float:
        """The time of one tick, in the unit of the costs."""
        costs = self.setting.costs
        longest = max(*costs.forward, *costs.backward_input, *costs.backward_weight, costs.transfer)
        return longest / _LONGEST if longest > 0 else 1.0

    def _ticks(self, time: float) -> int:
        return max(1, round(time / self.unit))

    def _numbers(self, action: Action) -> tuple[int, ...]:
        assert action.microbatch is not None
        kinds = (INPUT, WEIGHT) if action.kind is Kind.BACKWARD else (_NUMBERS[action.kind],)
        return tuple(self.number(kind, action.stage, action.microbatch) for kind in kinds)

    def _action(self, operation: int) -> Action:
        row, microbatch = divmod(operation, self.microbatches)
        kind, stage = divmod(row, self.stages)
        return Action(stage, _KINDS[kind], microbatch)


def timed(operations: Operations, orders: Sequence[Sequence[int]], durations: Sequence[int]) -> Timed:
    """Start everything as early as the orders of the ranks allow. The orders must be free of deadlock."""
    ranks, predecessors, successors = operations.ranks, operations.predecessors, operations.successors
    position, free = [0] * len(orders), [0] * len(orders)
    starts, ends = [0] * operations.count, [-1] * operations.count
    ready = list(range(len(orders)))
    while ready:
        rank = ready.pop()
        order, time = orders[rank], free[rank]
        for place in range(position[rank], len(order)):
            operation = order[place]
            start = time
            for source, delay in predecessors[operation]:
                end = ends[source]
                start = max(start, end + delay) if end >= 0 else -1
            if start < 0:
                break
            starts[operation] = start
            ends[operation] = time = start + durations[operation]
            position[rank], free[rank] = place + 1, time
            for waiting, _ in successors[operation]:
                other = ranks[waiting]
                if (
                    other != rank
                    and position[other] < len(orders[other])
                    and orders[other][position[other]] == waiting
                ):
                    ready.append(other)
    if any(place < len(order) for place, order in zip(position, orders, strict=True)):
        raise AssertionError("a generated order deadlocks")
    return Timed(starts, max(free))


def join_backwards(operations: Operations, schedule: Timed) -> ActionLists:
    """The schedule as actions, with I and W that follow each other joined to B where no one waits for I.

    A whole backward gives its gradient away only at its end. That costs nothing where the stage before does
    not need it earlier in this very timeline. It saves what splitting costs in reality: operands kept, and
    kernels launched twice.
    """
    starts, durations = schedule.starts, operations.durations
    weights, inputs = operations.number(WEIGHT, 0, 0), operations.number(INPUT, 0, 0)
    half = weights - inputs
    lists: list[tuple[Action, ...]] = []
    for order in operations.orders(starts):
        actions: list[Action] = []
        for before, operation in zip([-1, *order], order, strict=False):
            if operation >= weights and before == operation - half:
                end = starts[operation] + durations[operation]
                receivers = [each for each in operations.successors[before] if each[0] != operation]
                if all(starts[receiver] >= end + delay for receiver, delay in receivers):
                    stage, microbatch = actions[-1].stage, actions[-1].microbatch
                    actions[-1] = Action(stage, Kind.BACKWARD, microbatch)
                    continue
            actions.append(operations.actions([[operation]])[0][0])
        lists.append(tuple(actions))
    return tuple(lists)


def step_of(setting: Setting, lists: ActionLists) -> int:
    """The time of lists free of deadlock, in ticks: to compare schedules of one setting."""
    operations = Operations.of(setting)
    return timed(operations, operations.numbered(lists), operations.durations).step
