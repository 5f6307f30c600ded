"""When a send is known to be complete, so that its tensor can be freed without asking the backend.

A backend may not tell before one waits for it (gloo does not), and to wait for a send in the middle of the list
could block. But a message that has come back from the peer tells: if the peer posted it after an action that
consumed ours, ours has arrived. That follows from the lists alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping

from parallelisms.pipeline.actions import Action, ActionLists, Kind
from parallelisms.pipeline.communicate import channel_of
from parallelisms.pipeline.setting import Placement

# Of a send: by how many stages the receiver is away, and the compute actions that wait for the message.
_CONSUMERS = {
    Kind.SEND_ACTIVATION: (1, (Kind.FORWARD,)),
    Kind.SEND_GRADIENT: (-1, (Kind.BACKWARD, Kind.BACKWARD_INPUT)),
}

Positions = Mapping[Action, int]


def release_points(lists: ActionLists, placement: Placement, rank: int) -> dict[int, tuple[Action, ...]]:
    """For positions in the rank's list: the sends that are complete once the action there is carried out.

    Sends of which nothing is known before the end of the list are left out. The lists must be proven.
    """
    positions = [{action: i for i, action in enumerate(actions)} for actions in lists]
    evidence = _evidence(lists, placement, positions, rank)
    releases: dict[int, list[Action]] = defaultdict(list)
    for action in lists[rank]:
        if not action.kind.is_send:
            continue
        peer = channel_of(action, placement).destination
        posted, known = evidence.get(peer, ([], []))
        later = bisect_right(posted, _consumption(action, positions[peer]))
        if later < len(known):
            releases[known[later]].append(action)
    return {position: tuple(sends) for position, sends in releases.items()}


def _evidence(
    lists: ActionLists, placement: Placement, positions: list[dict[Action, int]], rank: int
) -> dict[int, tuple[list[int], list[int]]]:
    """By peer: where it posts each message to this rank, ascending, and where this rank has consumed that
    message or a later one, at the earliest."""
    found: dict[int, tuple[list[int], list[int]]] = {}
    for peer, actions in enumerate(lists):
        if peer == rank:
            continue
        posted, known = [], []
        for position, action in enumerate(actions):
            if action.kind.is_send and channel_of(action, placement).destination == rank:
                posted.append(position)
                known.append(_consumption(action, positions[rank]))
        for index in reversed(range(len(known) - 1)):
            known[index] = min(known[index], known[index + 1])
        found[peer] = (posted, known)
    return found


def _consumption(send: Action, positions: Positions) -> int:
    """Position of the compute action that waits for the message of `send`."""
    step, kinds = _CONSUMERS[send.kind]
    consumers = (Action(send.stage + step, kind, send.microbatch, send.chunk) for kind in kinds)
    return next(positions[action] for action in consumers if action in positions)
