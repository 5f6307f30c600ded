"""The proof that a step completes and is correct: for the exact lists of actions that the ranks carry out.

**What is assumed of the executor and of the transport, and nothing else:**

1. A rank carries out its list in order.
2. A send or a receive posts its transfer and goes on. A compute action waits for the receive of its own input
   (RECV_F before F, RECV_B before B or I) and for nothing else. What was posted is waited for at the end.
3. A channel is (source rank, destination rank, activations or gradients). A message completes only when both
   sides are posted: nothing is buffered. Messages carry no tags: the n-th send of a channel meets its n-th
   receive. Channels do not hold each other up.

This is the weakest that works. Were sends to block until their receive is posted, 1F1B with two ranks and two
microbatches would already deadlock (each rank sends to the other before it receives). Were buffers assumed,
large activations would hang what small ones do not. Tags would have to be added to every backend.

**What follows.** A compute action that has been reached waits only until its sender has *posted*: its own
receive stands before it in the list, and everything before both in the channel is posted too, for lists are
carried out in order and both sides have the same sequence. So the step completes if and only if the graph of
"next in the list" and "posted before used" has no cycle. `stretches` walks that graph once; what is left over
holds a cycle, and the error names it. When all ranks are through their lists all transfers are posted on both
sides, and the final wait ends.

All checks are linear in the number of actions.
"""

from __future__ import annotations

from dataclasses import dataclass

from parallelisms.pipeline.actions import Action, ActionLists, Kind
from parallelisms.pipeline.communicate import Channel, channel_of
from parallelisms.pipeline.errors import ChannelError, MissingActionError, OrderError
from parallelisms.pipeline.inventory import ABSENT, Inventory, check_complete, take_inventory
from parallelisms.pipeline.progress import stretches
from parallelisms.pipeline.setting import Placement
from parallelisms.pipeline.sharding import check_sharding


@dataclass(frozen=True)
class Proof:
    """What is known of verified lists.

    `peak_activations[rank]` is the largest number of activations held at once for a backward, each of one
    microbatch on one stage: from its forward until its B or W has been carried out. `peak_share[rank]` is the
    same in microbatches of the rank's whole share (of v stages, each counts 1/v). Both are zero for
    validation, where nothing is held.
    """

    actions: int
    messages: int
    peak_activations: tuple[int, ...]
    peak_share: tuple[float, ...]


def verify(
    lists: ActionLists,
    placement: Placement,
    microbatches: int,
    forward_only: bool = False,
    sharded: bool | None = None,
) -> Proof:
    """Prove that the lists are one complete and correct step that never hangs.

    Args:
        lists: every action of every rank, with communication.
        placement: the owner of each stage.
        microbatches: how many there are, from 0.
        forward_only: the step is one of validation.
        sharded: whether parameters are sharded; None: they are if the lists gather any.

    Raises:
        VerificationError: a subclass of it for each kind of fault, naming ranks and actions.
    """
    inventory = take_inventory(lists, placement, microbatches)
    check_complete(inventory, forward_only)
    _check_local_order(inventory, forward_only)
    _check_transfers_are_there(inventory, forward_only)
    messages = _check_channels(lists, placement)
    check_sharding(lists, forward_only, sharded)
    count = sum(stretch.stop - stretch.start for stretch in stretches(lists, placement))
    peaks = tuple(0 if forward_only else peak_activations(actions) for actions in lists)
    shares = tuple(peak / max(len(placement.stages_of(rank)), 1) for rank, peak in enumerate(peaks))
    return Proof(count, messages, peaks, shares)


def peak_activations(actions: tuple[Action, ...]) -> int:
    """The most activations (of one microbatch on one stage) that a rank holds at once in a training step."""
    held = peak = 0
    for action in actions:
        kind = action.kind
        if kind is Kind.FORWARD:
            held += 1
            peak = max(peak, held)
        elif kind is Kind.BACKWARD or kind is Kind.BACKWARD_WEIGHT:
            held -= 1
    return peak


def _check_local_order(inventory: Inventory, forward_only: bool) -> None:
    """Dependencies within a rank: forward, backward of inputs, of weights; neighbours on the same rank."""
    owners, stages = inventory.placement.owners, inventory.placement.stages
    m = inventory.microbatches
    forward, weights = inventory.at[Kind.FORWARD], inventory.at[Kind.BACKWARD_WEIGHT]
    inputs = [
        whole if whole != ABSENT else split
        for whole, split in zip(inventory.at[Kind.BACKWARD], inventory.at[Kind.BACKWARD_INPUT], strict=True)
    ]
    for index, stage, microbatch in inventory.cells():
        rank = owners[stage]
        neighbours = stage + 1 < stages and owners[stage + 1] == rank
        if neighbours and forward[index] > forward[index + m]:
            raise _out_of_order(rank, f"{stage + 1}F{microbatch}", f"{stage}F{microbatch}")
        if forward_only:
            continue
        back = "B" if inventory.at[Kind.BACKWARD][index] != ABSENT else "I"
        if forward[index] > inputs[index]:
            raise _out_of_order(rank, f"{stage}{back}{microbatch}", f"{stage}F{microbatch}")
        if weights[index] != ABSENT and inputs[index] > weights[index]:
            raise _out_of_order(rank, f"{stage}W{microbatch}", f"{stage}I{microbatch}")
        if neighbours and inputs[index + m] > inputs[index]:
            needed = "B" if inventory.at[Kind.BACKWARD][index + m] != ABSENT else "I"
            raise _out_of_order(rank, f"{stage}{back}{microbatch}", f"{stage + 1}{needed}{microbatch}")


def _out_of_order(rank: int, action: str, needed: str) -> OrderError:
    return OrderError(f"rank {rank} runs {action} before {needed}, which it depends on")


def _check_transfers_are_there(inventory: Inventory, forward_only: bool) -> None:
    """Each message between ranks is sent after it is made and received before it is used; no others."""
    at = inventory.at
    made = [max(pair) for pair in zip(at[Kind.BACKWARD], at[Kind.BACKWARD_INPUT], strict=True)]
    _check_payload(inventory, at[Kind.FORWARD], Kind.SEND_ACTIVATION, Kind.RECEIVE_ACTIVATION, step=1)
    _check_payload(
        inventory, made, Kind.SEND_GRADIENT, Kind.RECEIVE_GRADIENT, step=-1, none_at_all=forward_only
    )


def _check_payload(
    inventory: Inventory, computed: list[int], send: Kind, receive: Kind, step: int, none_at_all: bool = False
) -> None:
    """`computed` are the positions of what makes a message on its sender and uses it on its receiver."""
    owners, stages = inventory.placement.owners, inventory.placement.stages
    for index, stage, microbatch in inventory.cells():
        for kind, other in ((send, stage + step), (receive, stage - step)):
            position = inventory.at[kind][index]
            crosses = 0 <= other < stages and owners[other] != owners[stage] and not none_at_all
            action = f"{stage}{kind.value}{microbatch}"
            if not crosses:
                if position != ABSENT:
                    raise ChannelError(f"rank {owners[stage]} has {action}, but that message does not exist")
            elif position == ABSENT:
                raise MissingActionError(_missing_transfer(inventory, kind, stage, other, microbatch))
            elif kind is send and position < computed[index]:
                raise OrderError(f"rank {owners[stage]} posts {action} before it has computed what is sent")
            elif kind is receive and position > computed[index]:
                raise OrderError(f"rank {owners[stage]} uses what {action} receives before it is posted")


def _missing_transfer(inventory: Inventory, kind: Kind, stage: int, other: int, microbatch: int) -> str:
    here, there = inventory.placement.owners[stage], inventory.placement.owners[other]
    action = f"{stage}{kind.value}{microbatch}"
    if kind.is_send:
        return f"rank {here} never posts {action}: rank {there} would wait for it for ever"
    return f"rank {here} never posts {action}: the send of rank {there} would never meet it"


def _check_channels(lists: ActionLists, placement: Placement) -> int:
    """Both sides of every channel post the same messages in the same order; returns how many there are."""
    sent: dict[Channel, list[Action]] = {}
    received: dict[Channel, list[Action]] = {}
    # All transfers of one kind and stage belong to one channel.
    queues: dict[tuple[str, int], list[Action]] = {}
    for actions in lists:
        for action in actions:
            kind = action.kind
            if not (kind.is_send or kind.is_receive):
                continue
            key = (kind._value_, action.stage)
            if key not in queues:
                side = sent if kind.is_send else received
                queues[key] = side.setdefault(channel_of(action, placement), [])
            queues[key].append(action)
    for channel, sends in sent.items():
        for place, (send, receive) in enumerate(zip(sends, received[channel], strict=True)):
            step = 1 if send.kind is Kind.SEND_ACTIVATION else -1
            if (receive.stage, receive.microbatch) != (send.stage + step, send.microbatch):
                raise ChannelError(
                    f"channel {channel}: message {place} is sent by {send} but received by {receive}: "
                    f"rank {channel.destination} posts its receives in another order than "
                    f"rank {channel.source} its sends"
                )
    return sum(len(sends) for sends in sent.values())
