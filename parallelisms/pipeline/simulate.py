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
from parallelisms.pipeline.progress import stretches
from parallelisms.pipeline.setting import Costs, Placement
from parallelisms.pipeline.verify import peak_activations

_NEVER = -1.0  # no time: times start at 0


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
    named = (action.microbatch for actions in lists for action in actions)
    microbatches = 1 + max((each for each in named if each is not None), default=-1)
    clock = _Clock(placement, costs, len(lists), microbatches)
    for stretch in stretches(lists, placement):
        for action in lists[stretch.rank][stretch.start : stretch.stop]:
            clock.carry_out(stretch.rank, action)
    spans = tuple(tuple(each) for each in clock.spans)
    step = max((each[-1].end for each in spans if each), default=0.0)
    work = [sum(span.end - span.start for span in each) for each in spans]
    lengths = [each[-1].end - each[0].start if each else 0.0 for each in spans]
    kinds = {span.action.kind for each in spans for span in each}
    forward_only = kinds <= {Kind.FORWARD}
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


class _Messages:
    """The activations, or the gradients, that go from stage to stage; each by producing stage and microbatch.

    Their index is stage * microbatches + microbatch. A message that is never received by a RECEIVE action is
    there `transfer` after it was made.
    """

    def __init__(self, owners: tuple[int, ...], microbatches: int, transfer: float) -> None:
        count = len(owners) * microbatches
        self._owners, self._microbatches, self._transfer = owners, microbatches, transfer
        self._made = [0.0] * count
        self._posted = [_NEVER] * count  # when the receive was posted
        self._received = [_NEVER] * count
        # By source and destination: receives that are not through, and when the last one was.
        self._queues: dict[tuple[int, int], deque[int]] = {}
        self._through: dict[tuple[int, int], float] = {}

    def make(self, producer: int, microbatch: int, time: float) -> None:
        self._made[producer * self._microbatches + microbatch] = time

    def post_receive(self, producer: int, microbatch: int, rank: int, time: float) -> None:
        index = producer * self._microbatches + microbatch
        self._posted[index] = time
        self._queues.setdefault((self._owners[producer], rank), deque()).append(index)

    def arrival(self, producer: int, microbatch: int, rank: int) -> float:
        """When `rank` can use the message, which has been made."""
        index = producer * self._microbatches + microbatch
        if self._owners[producer] == rank:
            return self._made[index]
        if self._posted[index] == _NEVER:
            return self._made[index] + self._transfer
        channel = (self._owners[producer], rank)
        queue = self._queues[channel]
        while self._received[index] == _NEVER:
            first = queue.popleft()
            free = max(self._made[first], self._posted[first], self._through.get(channel, 0.0))
            self._through[channel] = self._received[first] = free + self._transfer
        return self._received[index]


class _Clock:
    """When each rank is free and each message is there. Actions come in an order of `stretches`."""

    def __init__(self, placement: Placement, costs: Costs, ranks: int, microbatches: int) -> None:
        self.spans: list[list[Span]] = [[] for _ in range(ranks)]
        self._free = [0.0] * ranks
        self._last_stage = placement.stages - 1
        self._activations = _Messages(placement.owners, microbatches, costs.transfer)
        self._gradients = _Messages(placement.owners, microbatches, costs.transfer)
        both = tuple(b + w for b, w in zip(costs.backward_input, costs.backward_weight, strict=True))
        self._duration = {
            Kind.FORWARD: costs.forward,
            Kind.BACKWARD: both,
            Kind.BACKWARD_INPUT: costs.backward_input,
            Kind.BACKWARD_WEIGHT: costs.backward_weight,
        }

    def carry_out(self, rank: int, action: Action) -> None:
        kind, stage, microbatch = action.kind, action.stage, action.microbatch
        if microbatch is None:
            return
        if kind is Kind.RECEIVE_ACTIVATION:
            self._activations.post_receive(stage - 1, microbatch, rank, self._free[rank])
        elif kind is Kind.RECEIVE_GRADIENT:
            self._gradients.post_receive(stage + 1, microbatch, rank, self._free[rank])
        elif kind.is_compute:
            start = max(self._free[rank], self._ready(rank, kind, stage, microbatch))
            end = self._free[rank] = start + self._duration[kind][stage]
            if kind is not Kind.BACKWARD_WEIGHT:
                made = self._activations if kind is Kind.FORWARD else self._gradients
                made.make(stage, microbatch, end)
            self.spans[rank].append(Span(action, start, end))

    def _ready(self, rank: int, kind: Kind, stage: int, microbatch: int) -> float:
        """When the input of a compute action is on its rank."""
        if kind is Kind.FORWARD:
            return self._activations.arrival(stage - 1, microbatch, rank) if stage > 0 else 0.0
        if kind is Kind.BACKWARD_WEIGHT or stage == self._last_stage:
            return 0.0
        return self._gradients.arrival(stage + 1, microbatch, rank)
