"""An independent check of action lists: run them on symbols, with real queues, and look at what comes out.

It shares no code and no reasoning with the verifier. Messages carry what the sender has, receives fill buffers
in the order of the queue, and a step is right if it ends, every stage has accumulated the gradient of every
microbatch exactly once from the right inputs, nothing is left over anywhere, and no stage ever computed or
reduced with its parameters sharded.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from parallelisms.pipeline.actions import Action, ActionLists, Kind
from parallelisms.pipeline.setting import Placement


class Wrong(AssertionError):
    """The step does not end, or ends wrong."""


def run_on_symbols(
    lists: ActionLists, placement: Placement, microbatches: int, sharded: bool = False
) -> list[int]:
    """Carry out the lists; returns the most activations that each rank held. Raises Wrong."""
    return _Machine(lists, placement, microbatches, sharded).run()


class _Machine:
    def __init__(self, lists: ActionLists, placement: Placement, microbatches: int, sharded: bool) -> None:
        self.lists, self.placement, self.microbatches, self.sharded = lists, placement, microbatches, sharded
        self.owners = placement.owners
        self.channels: dict[Any, list[Any]] = defaultdict(list)  # posted sends that no receive has met
        self.posted: dict[Any, list[Any]] = defaultdict(list)  # posted receives that no send has met
        self.inputs: dict[
            Any, Any
        ] = {}  # (rank, "F" or "B", stage, microbatch): what was handed over or received
        self.outputs: dict[Any, Any] = {}  # what a rank has computed and not yet sent
        self.saved: dict[Any, Any] = {}  # (stage, microbatch): input of a forward, kept for its backward
        self.pending: dict[Any, Any] = {}  # (stage, microbatch): kept for its weight gradient
        self.gradients: dict[int, Counter[Any]] = defaultdict(Counter)
        self.gathered: set[int] = set()
        self.reduced: Counter[int] = Counter()
        self.most = [0] * len(lists)

    def run(self) -> list[int]:
        at = [0] * len(self.lists)
        moved = True
        while moved:
            moved = False
            for rank, actions in enumerate(self.lists):
                if at[rank] < len(actions) and self.step(rank, actions[at[rank]]):
                    at[rank] += 1
                    moved = True
        if any(position < len(actions) for position, actions in zip(at, self.lists, strict=True)):
            raise Wrong("does not end")
        self.check_end()
        return self.most

    def step(self, rank: int, action: Action) -> bool:
        """Carry out one action; False if it has to wait."""
        stage, microbatch, kind = action.stage, action.microbatch, action.kind
        if stage >= len(self.owners) or self.owners[stage] != rank:
            raise Wrong("wrong rank")
        if kind.is_compute:
            return self.compute(rank, action)
        if kind.is_send:
            letter = "F" if kind is Kind.SEND_ACTIVATION else "B"
            to = stage + 1 if letter == "F" else stage - 1
            if (letter, stage, microbatch) not in self.outputs or not 0 <= to < len(self.owners):
                raise Wrong("nothing to send")
            channel = (rank, self.owners[to], letter)
            self.channels[channel].append(self.outputs.pop((letter, stage, microbatch)))
            self.match(channel)
        elif kind.is_receive:
            letter = "F" if kind is Kind.RECEIVE_ACTIVATION else "B"
            source = stage - 1 if letter == "F" else stage + 1
            if not 0 <= source < len(self.owners):
                raise Wrong("nobody to receive from")
            channel = (self.owners[source], rank, letter)
            key = (letter, stage, microbatch)
            if key in self.inputs or any(key in keys for keys in self.posted.values()):
                raise Wrong("received twice")
            self.posted[channel].append(key)
            self.match(channel)
        elif kind is Kind.UNSHARD:
            self.toggle(stage, to=True)
        elif kind is Kind.RESHARD:
            self.toggle(stage, to=False)
        else:
            self.reduced[stage] += 1
            if sum(self.gradients[stage].values()) != self.microbatches:
                raise Wrong("reduced before the last backward")
        return True

    def toggle(self, stage: int, to: bool) -> None:
        if (stage in self.gathered) == to:
            raise Wrong("gathered or released twice")
        (self.gathered.add if to else self.gathered.discard)(stage)

    def match(self, channel: Any) -> None:
        while self.channels[channel] and self.posted[channel]:
            self.inputs[self.posted[channel].pop(0)] = self.channels[channel].pop(0)

    def compute(self, rank: int, action: Action) -> bool:
        stage, microbatch, kind = action.stage, action.microbatch, action.kind
        key = (stage, microbatch)
        if self.sharded and stage not in self.gathered:
            raise Wrong("computed while sharded")
        if kind is Kind.BACKWARD_WEIGHT:
            if key not in self.pending:
                raise Wrong("weights before inputs")
            self.accumulate(stage, self.pending.pop(key))
            return True
        letter = "F" if kind is Kind.FORWARD else "B"
        edge = stage == 0 if letter == "F" else stage == len(self.owners) - 1
        if letter == "B" and key not in self.saved:
            raise Wrong("backward before forward")
        if edge:
            value: Any = ("tokens", microbatch) if letter == "F" else ("loss", microbatch)
        elif (letter, stage, microbatch) in self.inputs:
            value = self.inputs.pop((letter, stage, microbatch))
        else:
            source = stage - 1 if letter == "F" else stage + 1
            posted = self.posted[self.owners[source], rank, letter]
            if (letter, stage, microbatch) not in posted:
                raise Wrong("its input is not even asked for")
            return False
        if letter == "F":
            if key in self.saved:
                raise Wrong("forward twice")
            self.saved[key] = value
        elif kind is Kind.BACKWARD:
            self.accumulate(stage, (self.saved.pop(key), value))
        else:
            self.pending[key] = (self.saved.pop(key), value)
        held = sum(1 for s, _ in [*self.saved, *self.pending] if self.owners[s] == rank)
        self.most[rank] = max(self.most[rank], held)
        self.hand_on(rank, letter, stage, microbatch, ("F" if letter == "F" else "B", stage, value))
        return True

    def accumulate(self, stage: int, contribution: Any) -> None:
        if self.reduced[stage]:
            raise Wrong("accumulated after the reduction")
        self.gradients[stage][contribution] += 1

    def hand_on(self, rank: int, letter: str, stage: int, microbatch: Any, value: Any) -> None:
        to = stage + 1 if letter == "F" else stage - 1
        if not 0 <= to < len(self.owners):
            return
        where = self.inputs if self.owners[to] == rank else self.outputs
        where[letter, to if where is self.inputs else stage, microbatch] = value

    def check_end(self) -> None:
        leftovers = [self.inputs, self.outputs, self.saved, self.pending]
        if any(leftovers) or any(self.channels.values()) or any(self.posted.values()):
            raise Wrong("something is left over")
        for stage in range(len(self.owners)):
            wanted = Counter(
                (self.activation(stage, m), self.gradient(stage, m)) for m in range(self.microbatches)
            )
            if self.gradients[stage] != wanted:
                raise Wrong("wrong gradients")
            if self.sharded and (self.reduced[stage] != 1 or stage in self.gathered):
                raise Wrong("not reduced once, or not released")

    def activation(self, stage: int, microbatch: int) -> Any:
        """What stage `stage` must have got as its input."""
        value: Any = ("tokens", microbatch)
        for before in range(stage):
            value = ("F", before, value)
        return value

    def gradient(self, stage: int, microbatch: int) -> Any:
        value: Any = ("loss", microbatch)
        for after in range(len(self.owners) - 1, stage, -1):
            value = ("B", after, value)
        return value
