"""In which order lists of actions can be carried out, or who waits for whom for ever.

The semantics are those that `verify` documents: only compute actions wait, each for the message that it uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from parallelisms.pipeline.actions import Action, ActionLists, Kind
from parallelisms.pipeline.errors import DeadlockError
from parallelisms.pipeline.setting import Placement

# Enum members as dictionary keys are hashed by a Python function; these loops run a million times.
_F, _B, _I = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT
_SEND_F, _SEND_B = Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT


@dataclass(frozen=True)
class Stretch:
    """What `rank` can carry out next, without waiting in between: its actions from `start` up to `stop`."""

    rank: int
    start: int
    stop: int


@dataclass(frozen=True)
class _Blocked:
    """A rank cannot go on from `action`, which needs the message or result of `needed` on `on_rank`."""

    action: Action
    needed: Action
    on_rank: int


class Progress:
    """Lets every rank go on as far as it can, again and again: linear in the number of actions.

    In lists without any send, the compute actions themselves hand over to the other rank.
    """

    def __init__(self, lists: ActionLists, placement: Placement) -> None:
        self._lists = lists
        self._owners = placement.owners
        self._last_stage = placement.stages - 1
        self._communicates = any(action.kind.is_send for actions in lists for action in actions)
        self._done: set[tuple[bool, int, int]] = set()  # (is activation, producing stage, microbatch)
        self._position = [0] * len(lists)
        self._waiting: dict[tuple[bool, int, int], int] = {}

    def stretches(self) -> Iterator[Stretch]:
        """Every action, each after all that it depends on. Raises DeadlockError with the cycle."""
        ready = list(range(len(self._lists)))
        while ready:
            rank = ready.pop()
            start = self._position[rank]
            ready += self._go_on(rank)
            yield Stretch(rank, start, self._position[rank])
        if self._waiting:
            raise DeadlockError(self._describe_deadlock())

    def _go_on(self, rank: int) -> list[int]:
        """Carry out what the rank can; returns the ranks that waited for any of it."""
        actions, done, waiting = self._lists[rank], self._done, self._waiting
        woken: list[int] = []
        for position in range(self._position[rank], len(actions)):
            action = actions[position]
            need = self._need(action)
            if need is not None and need not in done:
                self._position[rank] = position
                waiting[need] = rank
                return woken
            made = self._made(action)
            if made is not None:
                done.add(made)
                if made in waiting:
                    woken.append(waiting.pop(made))
        self._position[rank] = len(actions)
        return woken

    def _need(self, action: Action) -> tuple[bool, int, int] | None:
        """What the action waits for."""
        kind, stage = action.kind, action.stage
        if kind is _F:
            return (True, stage - 1, action.microbatch) if stage > 0 else None  # type: ignore[return-value]
        if kind is _B or kind is _I:
            return (False, stage + 1, action.microbatch) if stage < self._last_stage else None  # type: ignore[return-value]
        return None

    def _made(self, action: Action) -> tuple[bool, int, int] | None:
        """What can be used by the next stage once the action is carried out."""
        kind, stage = action.kind, action.stage
        if kind is _SEND_F or kind is _SEND_B:
            return (kind is _SEND_F, stage, action.microbatch)  # type: ignore[return-value]
        if kind is _F or kind is _B or kind is _I:
            receiver = stage + 1 if kind is _F else stage - 1
            if not self._communicates or (
                0 <= receiver <= self._last_stage and self._owners[receiver] == self._owners[stage]
            ):
                return (kind is _F, stage, action.microbatch)  # type: ignore[return-value]
        return None

    def _describe_deadlock(self) -> str:
        blocked = {rank: self._blocked(rank, need) for need, rank in self._waiting.items()}
        path: list[int] = []
        rank = min(blocked)
        while rank in blocked and rank not in path:
            path.append(rank)
            rank = blocked[rank].on_rank
        closed = rank in path
        # What leads into the cycle is not part of it.
        waits = "; ".join(
            f"rank {each} waits at {blocked[each].action} for {blocked[each].needed} of rank {blocked[each].on_rank}"
            for each in (path[path.index(rank) :] if closed else path)
        )
        return f"deadlock: {waits}" if closed else f"deadlock: {waits}, which never comes to it"

    def _blocked(self, rank: int, need: tuple[bool, int, int]) -> _Blocked:
        is_activation, stage, microbatch = need
        owner = self._owners[stage]
        if self._communicates and owner != rank:
            makers: tuple[Kind, ...] = (_SEND_F if is_activation else _SEND_B,)
        else:
            makers = (_F,) if is_activation else (_B, _I)
        needed = next(
            (
                action
                for action in self._lists[owner]
                if action.stage == stage and action.microbatch == microbatch and action.kind in makers
            ),
            Action(stage, makers[0], microbatch),
        )
        return _Blocked(self._lists[rank][self._position[rank]], needed, owner)


def stretches(lists: ActionLists, placement: Placement) -> Iterator[Stretch]:
    """Every action of all ranks in an order in which they can be carried out. Raises DeadlockError."""
    return Progress(lists, placement).stretches()
