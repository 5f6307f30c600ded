"""Complete the compute actions of each rank with sends and receives.

- A send stands directly after the compute action that makes its message.
- A receive is posted just before the compute action that precedes its consumer, so that the transfer overlaps
  with that action and its buffer is held no longer than this needs. There are no tags: what one rank receives
  from another is posted in the order in which that one sends it, so a receive moves forward where a later
  message is wanted first. Each channel alone would be enough for our executor; activations and gradients
  are ordered together so that the same lists are right where they share a queue, as in torch's own runtime.
- Stages that are neighbours on one rank hand over without any of this.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from parallelisms.pipeline.actions import Action, ActionLists, Kind
from parallelisms.pipeline.setting import Placement
from parallelisms.pipeline.sharding import add_sharding


class Payload(Enum):
    """What a message carries."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"


@dataclass(frozen=True)
class Channel:
    """From pipeline rank `source` to pipeline rank `destination`; its messages match in order of posting."""

    source: int
    destination: int
    payload: Payload

    def __str__(self) -> str:
        return f"rank {self.source} -> rank {self.destination} ({self.payload.value}s)"


# What becomes of the result of a compute action: the send, the receive, and how far away the receiver is.
_PRODUCES = {
    Kind.FORWARD: (Kind.SEND_ACTIVATION, Kind.RECEIVE_ACTIVATION, 1),
    Kind.BACKWARD: (Kind.SEND_GRADIENT, Kind.RECEIVE_GRADIENT, -1),
    Kind.BACKWARD_INPUT: (Kind.SEND_GRADIENT, Kind.RECEIVE_GRADIENT, -1),
}
# From the stage of a transfer to the stages of its source and of its destination.
_TRANSFERS = {
    Kind.SEND_ACTIVATION: (0, 1, Payload.ACTIVATION),
    Kind.RECEIVE_ACTIVATION: (-1, 0, Payload.ACTIVATION),
    Kind.SEND_GRADIENT: (0, -1, Payload.GRADIENT),
    Kind.RECEIVE_GRADIENT: (1, 0, Payload.GRADIENT),
}


def channel_of(action: Action, placement: Placement) -> Channel:
    """The channel of a send or a receive whose two stages exist. Raises ValueError for other kinds."""
    if action.kind not in _TRANSFERS:
        raise ValueError(f"{action} is neither a send nor a receive")
    source, destination, payload = _TRANSFERS[action.kind]
    owners = placement.owners
    return Channel(owners[action.stage + source], owners[action.stage + destination], payload)


def compute_only(lists: ActionLists) -> ActionLists:
    """The lists without communication and sharding."""
    return tuple(tuple(action for action in actions if action.kind.is_compute) for actions in lists)


def add_communication(lists: ActionLists, placement: Placement, sharded: bool = False) -> ActionLists:
    """The complete lists of what each rank does, from its compute actions.

    Lists that are wrong are completed as far as they go, for `verify` to refuse by name.

    Args:
        lists: compute actions only.
        placement: the owner of each stage.
        sharded: the parameters of every stage are sharded over data-parallel ranks (FSDP).
    """
    messages = [[_message(action, placement) for action in actions] for actions in lists]
    posts: list[_Posts] = [{} for _ in lists]
    consumers = [_consumer_positions(actions) for actions in lists]
    for (_, destination), receives in _receives_in_order_of_sending(messages, placement).items():
        if destination < len(lists):
            _post(receives, consumers[destination], posts[destination])
    complete = tuple(tuple(_complete(*each)) for each in zip(lists, messages, posts, strict=True))
    return add_sharding(complete) if sharded else complete


# The send and the receive of what a compute action makes; None if nothing leaves the rank.
_Message = tuple[Action, Action] | None
# The receives of a rank by the position of the compute action before which they are posted.
_Posts = dict[int, list[Action]]
# A message: whether it is an activation, the receiving stage, the microbatch.
_Key = tuple[bool, int, int | None]


def _consumer_positions(actions: tuple[Action, ...]) -> dict[_Key, int]:
    """Where a rank needs each message: the position of the compute action that uses it."""
    return {
        (action.kind is Kind.FORWARD, action.stage, action.microbatch): position
        for position, action in enumerate(actions)
        if action.kind is not Kind.BACKWARD_WEIGHT
    }


def _message(action: Action, placement: Placement) -> _Message:
    if action.kind not in _PRODUCES:
        return None
    send, receive, step = _PRODUCES[action.kind]
    owners, receiver = placement.owners, action.stage + step
    if action.stage >= len(owners) or not 0 <= receiver < len(owners):
        return None
    if owners[receiver] == owners[action.stage]:
        return None
    return (
        Action(action.stage, send, action.microbatch, action.chunk),
        Action(receiver, receive, action.microbatch, action.chunk),
    )


def _receives_in_order_of_sending(
    messages: list[list[_Message]], placement: Placement
) -> dict[tuple[int, int], list[Action]]:
    """By sending and receiving rank: the receives, activations and gradients together."""
    pairs: dict[tuple[int, int], list[Action]] = {}
    for source, row in enumerate(messages):
        for message in row:
            if message is not None:
                pairs.setdefault((source, placement.owners[message[1].stage]), []).append(message[1])
    return pairs


def _post(receives: list[Action], consumers: dict[_Key, int], posts: _Posts) -> None:
    """Give every receive from one rank its slot, from the last to the first."""
    slots = []
    slot = max(consumers.values(), default=0)
    for receive in reversed(receives):
        key = (receive.kind is Kind.RECEIVE_ACTIVATION, receive.stage, receive.microbatch)
        # Never after a later message from that rank: its turn comes after this one.
        slot = min(slot, max(consumers.get(key, slot) - 1, 0))
        slots.append(slot)
    for receive, at in zip(receives, reversed(slots), strict=True):
        posts.setdefault(at, []).append(receive)


def _complete(actions: tuple[Action, ...], messages: list[_Message], posts: _Posts) -> Iterator[Action]:
    """One rank's list with the transfers around its compute actions."""
    for position, (action, message) in enumerate(zip(actions, messages, strict=True)):
        yield from posts.get(position, ())
        yield action
        if message is not None:
            yield message[0]
