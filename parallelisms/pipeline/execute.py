"""The executor: carries out one rank's verified list of actions.

It decides nothing. Sends and receives are posted where the list says and never block; a compute action waits
for the receive of its own input and for nothing else; everything posted is waited for at the end of the list.
These are the semantics under which `verify` proved the list free of deadlock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from models.layers.sequences import Sequences
from parallelisms.pipeline.actions import Action, ActionLists, Kind
from parallelisms.pipeline.channels import Channels
from parallelisms.pipeline.release import release_points
from parallelisms.pipeline.setting import Placement
from parallelisms.pipeline.stage import LossFunction, Stage

# What the compute kinds wait for.
_INPUT_OF = {
    Kind.FORWARD: Kind.RECEIVE_ACTIVATION,
    Kind.BACKWARD: Kind.RECEIVE_GRADIENT,
    Kind.BACKWARD_INPUT: Kind.RECEIVE_GRADIENT,
}
_LAST_BACKWARD = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)


class Observer(Protocol):
    """Told of every action as it happens: the watchdog and the timeline."""

    def begin(self, action: Action) -> None:
        """The rank has come to this action."""

    def wait(self, action: Action, transfer: Action, peer: int) -> None:
        """`action` now waits for `transfer`, whose other side is global rank `peer`."""

    def ready(self, action: Action) -> None:
        """What `action` waited for is there; its own work starts."""

    def end(self, action: Action) -> None:
        """The action is carried out (on an accelerator: enqueued). Of a send there is a second call, when it
        is noticed to be complete."""


@dataclass(frozen=True)
class Boundary:
    """What crosses from stage to stage: (rows of the microbatch, sequence length, model dimension)."""

    seq_len: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    def buffer(self, rows: int) -> Tensor:
        return torch.empty(rows, self.seq_len, self.dim, dtype=self.dtype, device=self.device)


@dataclass
class _Incoming:
    tensor: Tensor
    work: dist.Work | None = None  # None: handed over on this rank
    receive: Action | None = None


@dataclass(frozen=True)
class _Outgoing:
    tensor: Tensor  # must live until the work is complete
    work: dist.Work


class Executor:
    """Runs the list of one pipeline rank over the stages that the rank owns.

    `lists` are those of all pipeline ranks: what the others do tells when this rank's sends are complete.
    """

    def __init__(
        self,
        lists: ActionLists,
        placement: Placement,
        rank: int,
        stages: Mapping[int, Stage],
        channels: Channels | None,
        boundary: Boundary,
        observer: Observer,
    ) -> None:
        self._actions = lists[rank]
        self._releases = release_points(lists, placement, rank)
        self._stages = dict(stages)
        self._channels = channels
        self._boundary = boundary
        self._observer = observer
        self._last_backward = self._find_last_backwards()
        self.peak_held: int = 0  # microbatch activations of single stages held at once, in the last run
        self._incoming: dict[tuple[Kind, int, int], _Incoming] = {}
        self._outgoing: dict[tuple[Kind, int, int], Tensor] = {}
        self._sends: dict[Action, _Outgoing] = {}  # in order of posting
        self._losses: dict[int, Tensor] = {}
        self._sequences: Sequence[Sequences] | None = None

    def run(
        self,
        inputs: Sequence[Tensor],
        loss: LossFunction | None,
        *,
        sequences: Sequence[Sequences] | None = None,
        last_accumulation: bool = True,
    ) -> list[Tensor]:
        """Carry out the list once.

        Args:
            inputs: tokens (rows, T) of every microbatch; used by the first stage, and by all for their rows.
            loss: see `LossFunction`; used by the last stage.
            sequences: where the tokens of every microbatch stand; used by all stages. None: in order.
            last_accumulation: gradients of a sharded stage are reduced in this run.

        Returns:
            The loss of every microbatch, detached, on the rank that owns the last stage; otherwise nothing.
        """
        self.peak_held = 0
        self._sequences = sequences
        for stage in self._stages.values():
            if stage.sharding is not None:
                stage.sharding.set_last_backward(False)
        for position, action in enumerate(self._actions):
            self._observer.begin(action)
            last = last_accumulation and self._last_backward.get(action.stage) == position
            self._carry_out(action, inputs, loss, last=last, last_accumulation=last_accumulation)
            self._observer.end(action)
            for send in self._releases.get(position, ()):
                self._complete(send)
        self._finish()
        losses = [self._losses[microbatch] for microbatch in sorted(self._losses)]
        self._losses.clear()
        return losses

    def forget(self) -> None:
        """Let go of everything in flight, after a run that raised."""
        self._incoming.clear()
        self._outgoing.clear()
        self._sends.clear()
        self._losses.clear()
        for stage in self._stages.values():
            stage.forget()

    def _carry_out(
        self,
        action: Action,
        inputs: Sequence[Tensor],
        loss: LossFunction | None,
        *,
        last: bool,
        last_accumulation: bool,
    ) -> None:
        stage = self._stages[action.stage]
        match action.kind:
            case Kind.FORWARD:
                self._forward(stage, action, inputs, loss)
            case Kind.BACKWARD | Kind.BACKWARD_INPUT | Kind.BACKWARD_WEIGHT:
                self._backward(stage, action, last=last)
            case Kind.SEND_ACTIVATION | Kind.SEND_GRADIENT:
                self._send(action)
            case Kind.RECEIVE_ACTIVATION | Kind.RECEIVE_GRADIENT:
                self._receive(action, rows=_of(action, inputs).shape[0])
            case Kind.UNSHARD:
                _sharding(stage).unshard()
            case Kind.RESHARD:
                if last_accumulation:
                    _sharding(stage).reshard()
            case Kind.REDUCE_GRADIENT:
                if last_accumulation:
                    _sharding(stage).reduce_gradients()

    # Compute

    def _forward(
        self, stage: Stage, action: Action, inputs: Sequence[Tensor], loss: LossFunction | None
    ) -> None:
        x = _of(action, inputs) if stage.is_first else self._take_input(action)
        self._observer.ready(action)
        microbatch = _microbatch(action)
        sequences = None if self._sequences is None else self._sequences[microbatch]
        output = stage.forward(microbatch, x, loss, sequences)
        self.peak_held = max(self.peak_held, sum(s.microbatches_held for s in self._stages.values()))
        if stage.is_last:
            self._losses[microbatch] = output
        else:
            self._hand_on(Kind.FORWARD, stage.index + 1, action, output)

    def _backward(self, stage: Stage, action: Action, *, last: bool) -> None:
        microbatch = _microbatch(action)
        if action.kind is Kind.BACKWARD_WEIGHT:
            self._observer.ready(action)
            stage.backward_weight(microbatch)
            return
        output_gradient = None if stage.is_last else self._take_input(action)
        self._observer.ready(action)
        if action.kind is Kind.BACKWARD:
            if last and stage.sharding is not None:
                stage.sharding.set_last_backward(True)  # reductions overlap with this backward
            gradient = stage.backward(microbatch, output_gradient)
        else:
            gradient = stage.backward_input(microbatch, output_gradient)
        if not stage.is_first:
            assert gradient is not None
            self._hand_on(Kind.BACKWARD, stage.index - 1, action, gradient)

    # Transfer

    def _hand_on(self, kind: Kind, receiver: int, action: Action, tensor: Tensor) -> None:
        """Give a result to its receiving stage if that is on this rank, else keep it for the send."""
        if receiver in self._stages:
            receive = Kind.RECEIVE_ACTIVATION if kind is Kind.FORWARD else Kind.RECEIVE_GRADIENT
            self._incoming[receive, receiver, _microbatch(action)] = _Incoming(tensor)
        else:
            send = Kind.SEND_ACTIVATION if kind is Kind.FORWARD else Kind.SEND_GRADIENT
            self._outgoing[send, action.stage, _microbatch(action)] = tensor

    def _send(self, action: Action) -> None:
        assert self._channels is not None
        tensor = self._outgoing.pop((action.kind, action.stage, _microbatch(action))).contiguous()
        self._sends[action] = _Outgoing(tensor, self._channels.send(tensor, action))

    def _receive(self, action: Action, rows: int) -> None:
        assert self._channels is not None
        buffer = self._boundary.buffer(rows)
        work = self._channels.receive(buffer, action)
        self._incoming[action.kind, action.stage, _microbatch(action)] = _Incoming(buffer, work, action)

    def _take_input(self, action: Action) -> Tensor:
        incoming = self._incoming.pop((_INPUT_OF[action.kind], action.stage, _microbatch(action)))
        if incoming.work is not None and incoming.receive is not None:
            assert self._channels is not None
            self._observer.wait(action, incoming.receive, self._channels.peer(incoming.receive))
            incoming.work.wait()
        return incoming.tensor

    def _complete(self, send: Action) -> None:
        """Take note that a send is through, and free its tensor."""
        self._sends.pop(send).work.wait()
        self._observer.end(send)

    def _finish(self) -> None:
        """Wait for all sends: their buffers are free and their errors are known afterwards."""
        for send in tuple(self._sends):
            assert self._channels is not None
            self._observer.wait(send, send, self._channels.peer(send))
            self._complete(send)

    def _find_last_backwards(self) -> dict[int, int]:
        """Position of the action that completes each stage's gradients."""
        return {a.stage: position for position, a in enumerate(self._actions) if a.kind in _LAST_BACKWARD}


def _microbatch(action: Action) -> int:
    assert action.microbatch is not None
    return action.microbatch


def _of(action: Action, inputs: Sequence[Tensor]) -> Tensor:
    return inputs[_microbatch(action)]


def _sharding(stage: Stage):  # type: ignore[no-untyped-def]
    assert stage.sharding is not None, f"stage {stage.index} has no sharded parameters"
    return stage.sharding
