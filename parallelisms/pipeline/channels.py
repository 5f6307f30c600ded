"""Point-to-point transfer between pipeline ranks: one communicator for each direction and payload.

torch's point-to-point operations have no tags, and a NCCL communicator carries out what is posted to it in
order. With one communicator for both directions a send could wait behind a receive that waits for the peer's
send. So a channel, which is what the verifier reasons about, is (source, destination, payload), and channels
that share a pair of ranks never share a communicator.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from parallelisms.pipeline.actions import Action, ActionLists
from parallelisms.pipeline.communicate import Channel, channel_of
from parallelisms.pipeline.setting import Placement


def communicator_of(channel: Channel) -> tuple[str, bool]:
    """Channels with equal keys share a communicator; no two of one pair of ranks do."""
    return channel.payload.value, channel.source < channel.destination


class Channels:
    """The communicators of one pipeline, seen from one of its ranks."""

    def __init__(
        self, lists: ActionLists, placement: Placement, ranks: Sequence[int], rank: int, device: torch.device
    ):
        """Collective over the pipeline. `ranks[i]` is the global rank of pipeline rank i; `rank` is this one's."""
        self._placement = placement
        self._ranks = tuple(ranks)
        transfers = {channel_of(a, placement) for actions in lists for a in actions if a.kind.is_send}
        ordered = sorted(transfers, key=lambda c: (c.payload.value, c.source, c.destination))
        keys = dict.fromkeys(communicator_of(channel) for channel in ordered)
        self._groups = {key: dist.new_group(self._ranks, use_local_synchronization=True) for key in keys}
        self._connect(
            [channel for channel in ordered if rank in (channel.source, channel.destination)], rank, device
        )

    def _connect(self, channels: Sequence[Channel], rank: int, device: torch.device) -> None:
        """One tiny message on every channel, in an order that all ranks share.

        The first message of a pair makes its connection and, on NCCL, blocks both hosts until it stands. Inside
        a schedule that would be a rendezvous that nobody proved.
        """
        for channel in channels:
            message = torch.zeros(1, device=device)
            if rank == channel.source:
                self._post(dist.isend, message, channel, channel.destination).wait()
            else:
                self._post(dist.irecv, message, channel, channel.source).wait()

    def send(self, tensor: Tensor, action: Action) -> dist.Work:
        """Post the send; `tensor` must stay untouched until the work completes."""
        channel = channel_of(action, self._placement)
        return self._post(dist.isend, tensor.contiguous(), channel, channel.destination)

    def receive(self, buffer: Tensor, action: Action) -> dist.Work:
        """Post the receive into `buffer`."""
        channel = channel_of(action, self._placement)
        return self._post(dist.irecv, buffer, channel, channel.source)

    def peer(self, action: Action) -> int:
        """The global rank on the other side of a send or a receive."""
        channel = channel_of(action, self._placement)
        return self._ranks[channel.destination if action.kind.is_send else channel.source]

    def _post(self, operation, tensor: Tensor, channel: Channel, peer: int) -> dist.Work:  # type: ignore[no-untyped-def]
        return operation(tensor, self._ranks[peer], group=self._groups[communicator_of(channel)])
