"""The predicted timeline of a step: when each rank does what, given the cost of each stage.

A transfer begins when both sides are posted and the one before it in its channel is through; it takes
`costs.transfer` and keeps no rank busy. Lists without communication are timed as if every receive was posted
at once. Gathering, releasing and reducing parameters take no time.

There are two figures for the bubble, and they are often mixed up. Of a rank: its idle time between its own
first start and its own last end, which is what papers call "zero bubble". Of the step: the idle time of all
ranks between the first start and the last end of anything, which is what the wall clock pays.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from parallelisms.pipeline.actions import Action, ActionLists, Kind
from parallelisms.pipeline.bounds import lower_bound
from parallelisms.pipeline.progress import turns
from parallelisms.pipeline.setting import Costs, Placement
from parallelisms.pipeline.verify import peak_activations


@dataclass(frozen=True, slots=True)
class Span:
    """A compute action from `start` to `end`, in the unit of the costs, from the start of the step."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Prediction:
    """What a step is expected to look like.

    Attributes:
        spans: for each rank its compute actions in order.
        step: wall clock of the step.
        bound: the lower bound on it for this placement, these costs and this kind of backward.
        rank_bubbles: for each rank the idle share of the time from its first start to its last end.
        step_bubble: the idle share of ranks x step.
        peak_activations: for each rank as in `Proof`; zero for validation.
    """

    spans: tuple[tuple[Span, ...], ...]
    step: float
    bound: float
    rank_bubbles: tuple[float, ...]
    step_bubble: float
    peak_activations: tuple[int, ...]


def simulate(lists: ActionLists, placement: Placement, costs: Costs) -> Prediction:
    """Time the lists. Raises DeadlockError for lists that do not complete."""
    clock = _Clock(placement, costs, ranks=len(lists))
    for turn in turns(lists, placement):
        clock.carry_out(turn.rank, turn.action)
    spans = tuple(tuple(each) for each in clock.spans)
    step = max((each[-1].end for each in spans if each), default=0.0)
    work = [sum(span.end - span.start for span in each) for each in spans]
    lengths = [each[-1].end - each[0].start if each else 0.0 for each in spans]
    kinds = {span.action.kind for each in spans for span in each}
    forward_only = kinds <= {Kind.FORWARD}
    microbatches = 1 + max((span.action.microbatch or 0 for each in spans for span in each), default=-1)
    return Prediction(
        spans=spans,
        step=step,
        bound=lower_bound(placement, costs, microbatches, Kind.BACKWARD_INPUT in kinds, forward_only),
        rank_bubbles=tuple(_idle_share(busy, length) for busy, length in zip(work, lengths, strict=True)),
        step_bubble=_idle_share(sum(work), step * len(lists)),
        peak_activations=tuple(0 if forward_only else peak_activations(actions) for actions in lists),
    )


def _idle_share(busy: float, length: float) -> float:
    return max(0.0, 1.0 - busy / length) if length > 0 else 0.0


class _Clock:
    """When each rank is free and each message is there. Actions come in an order of `turns`."""

    def __init__(self, placement: Placement, costs: Costs, ranks: int) -> None:
        self.spans: list[list[Span]] = [[] for _ in range(ranks)]
        self._free = [0.0] * ranks
        self._owners = placement.owners
        self._transfer = costs.transfer
        self._duration = {
            Kind.FORWARD: costs.forward,
            Kind.BACKWARD: tuple(
                b + w for b, w in zip(costs.backward_input, costs.backward_weight, strict=True)
            ),
            Kind.BACKWARD_INPUT: costs.backward_input,
            Kind.BACKWARD_WEIGHT: costs.backward_weight,
        }
        # Of messages, by (is activation, producing stage, microbatch):
        self._made: dict[tuple[bool, int, int], float] = {}
        self._receive_posted: dict[tuple[bool, int, int], float] = {}
        self._received: dict[tuple[bool, int, int], float] = {}
        # Of channels, by (is activation, source, destination): what is posted, and when the last one was through.
        self._queues: dict[tuple[bool, int, int], deque[tuple[bool, int, int]]] = {}
        self._through: dict[tuple[bool, int, int], float] = {}

    def carry_out(self, rank: int, action: Action) -> None:
        kind = action.kind
        if kind.is_compute:
            self._compute(rank, action)
        elif kind.is_receive:
            forward = kind is Kind.RECEIVE_ACTIVATION
            producer = action.stage - 1 if forward else action.stage + 1
            assert action.microbatch is not None
            message = (forward, producer, action.microbatch)
            self._receive_posted[message] = self._free[rank]
            self._queues.setdefault((forward, self._owners[producer], rank), deque()).append(message)

    def _compute(self, rank: int, action: Action) -> None:
        kind, stage, microbatch = action.kind, action.stage, action.microbatch
        assert microbatch is not None
        start = self._free[rank]
        if kind is Kind.FORWARD:
            if stage > 0:
                start = max(start, self._arrival((True, stage - 1, microbatch), rank))
        elif kind is not Kind.BACKWARD_WEIGHT and stage + 1 < len(self._owners):
            start = max(start, self._arrival((False, stage + 1, microbatch), rank))
        end = start + self._duration[kind][stage]
        self._free[rank] = end
        if kind is not Kind.BACKWARD_WEIGHT:
            self._made[kind is Kind.FORWARD, stage, microbatch] = end
        self.spans[rank].append(Span(action, start, end))

    def _arrival(self, message: tuple[bool, int, int], rank: int) -> float:
        """When the result of another stage can be used on this rank."""
        source = self._owners[message[1]]
        made = self._made[message]
        if source == rank:
            return made
        if message not in self._receive_posted:
            return made + self._transfer
        channel = (message[0], source, rank)
        while message not in self._received:
            first = self._queues[channel].popleft()
            both_posted = max(self._made[first], self._receive_posted[first])
            self._through[channel] = max(both_posted, self._through.get(channel, 0.0)) + self._transfer
            self._received[first] = self._through[channel]
        return self._received[message]
