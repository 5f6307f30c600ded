"""Walks the list of actions of one rank and adds up what is alive on its device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parallelisms.pipeline.actions import Action, Kind
from trainer.plan.activations import StageActivations
from trainer.plan.state import StateBytes

_DOING = {
    Kind.FORWARD.value: "forward",
    Kind.BACKWARD.value: "backward",
    Kind.BACKWARD_INPUT.value: "input gradient",
    Kind.BACKWARD_WEIGHT.value: "weight gradient",
    Kind.REDUCE_GRADIENT.value: "reduction",
}


@dataclass(frozen=True)
class Moment:
    """What is alive on a device at one moment of the step, in bytes; `action` is the one in progress, or
    "optimizer".

    Attributes:
        parameters, gradients, optimizer: the state.
        gathered: whole parameters in the compute format, where FSDP shards them.
        unreduced: whole gradients that wait to be reduced, where FSDP shards them.
        activations: what microbatches hold from their forward to the end of their backward.
        buffers: messages between stages, what FSDP gathers into and reduces from, and gradients that were made
            with the loss.
        workspace: what the action in progress needs for itself.
    """

    action: str
    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    unreduced: int
    activations: int
    buffers: int
    workspace: int

    @property
    def doing(self) -> str:
        """What is in progress, without the stage and the microbatch."""
        return _DOING.get(self.action.strip("0123456789."), self.action)

    @property
    def total(self) -> int:
        """All of it."""
        return (
            self.parameters
            + self.gradients
            + self.optimizer
            + self.gathered
            + self.unreduced
            + self.activations
            + self.buffers
            + self.workspace
        )


@dataclass(frozen=True)
class StageMemory:
    """What one stage puts on the device of its rank, in bytes.

    Attributes:
        activations: what a microbatch holds.
        gradients: the rank's share of the gradients, once they are there.
        gathered: what gathering its parameters adds; 0 if they are not sharded or always there.
        gather_buffer: what the gathering needs beside that until the first forward.
        unreduced: whole gradients, from the first backward until they are reduced.
        reduce_buffer: what the reduction needs.
        fresh_gradients: what a backward has made and not yet added to the gradients that are there.
        fresh_input_gradients, fresh_weight_gradients: the same of the two parts of a split backward; the
            embedding's gradient comes with the first.
        loss_gradient: the output's weight gradient where it is made with the loss, until a backward takes it.
        first, last: where it is in the pipeline.
    """

    activations: StageActivations
    gradients: int
    gathered: int
    gather_buffer: int
    unreduced: int
    reduce_buffer: int
    fresh_gradients: int
    fresh_input_gradients: int
    fresh_weight_gradients: int
    loss_gradient: int
    first: bool
    last: bool


@dataclass(frozen=True)
class Walked:
    """The most that was alive, and the most bytes of activations among it, perhaps at another moment."""

    peak: Moment
    activations: int


def walk(
    actions: Sequence[Action],
    stages: Mapping[int, StageMemory],
    state: StateBytes,
    rows: Sequence[int],
    *,
    continues: bool,
    always: int = 0,
) -> Walked:
    """Carry out a rank's list.

    Args:
        actions: the rank's list.
        stages: those of the rank.
        state: what of the state is on the device; the gradients are there only once they have been computed.
        rows: sequences of each microbatch.
        continues: whether another run of the list came before in the same step: then parameters are gathered
            and gradients accumulated from the start.
        always: bytes of parameters that are gathered all the time.
    """
    walker = _Walker(stages, state, rows, gathered=always)
    if continues:
        for index, stage in stages.items():
            walker.gather(index)
            walker.begin_gradients(stage, index)
        walker.buffers = 0  # what was gathered is long in its place
    for action in actions:
        walker.carry_out(action)
    walker.end()
    return Walked(walker.peak, walker.most_activations)


class _Walker:
    """What is alive now, and the peak so far."""

    def __init__(
        self, stages: Mapping[int, StageMemory], state: StateBytes, rows: Sequence[int], gathered: int
    ) -> None:
        self.buffers = 0
        self.most_activations = 0
        self._stages = stages
        self._state = state
        self._rows = rows
        self._gradients = 0
        self._gathered = gathered
        self._unreduced = 0
        self._activations = 0
        self._are_gathered: set[int] = set()
        self._gathering: set[int] = set()  # stages whose parameters are still on their way
        self._have_gradients: set[int] = set()
        self._with_loss: set[int] = set()  # stages with gradients that were made with the loss
        self._sent = 0  # bytes that are sent while the next action computes
        self.peak = self._moment("start")

    def carry_out(self, action: Action) -> None:
        """Take one action of the list."""
        stage = self._stages[action.stage]
        match action.kind:
            case Kind.FORWARD:
                self._forward(action, stage)
            case Kind.BACKWARD | Kind.BACKWARD_INPUT | Kind.BACKWARD_WEIGHT:
                self._backward(action, stage)
            case Kind.RECEIVE_ACTIVATION | Kind.RECEIVE_GRADIENT:
                self.buffers += self._boundary(action, stage)
            case Kind.SEND_ACTIVATION | Kind.SEND_GRADIENT:
                self._sent += self._boundary(action, stage)
            case Kind.UNSHARD:
                self.gather(action.stage)
            case Kind.REDUCE_GRADIENT:
                self._see(action, workspace=stage.reduce_buffer)
                self._reduce(stage)
            case Kind.RESHARD:
                self._gathered -= stage.gathered
                self._are_gathered.discard(action.stage)

    def end(self) -> None:
        """The optimizer's turn: all gradients are there, and what was not reduced yet has been."""
        for index in self._have_gradients:
            if self._stages[index].unreduced and self._unreduced:
                self._reduce(self._stages[index])
        if self._alive() > self.peak.total:
            self.peak = self._moment("optimizer")

    def gather(self, index: int) -> None:
        """Gather the parameters of a stage, unless they are there."""
        if index in self._are_gathered:
            return
        self._are_gathered.add(index)
        self._gathered += self._stages[index].gathered
        self._gathering.add(index)
        self.buffers += self._stages[index].gather_buffer

    def begin_gradients(self, stage: StageMemory, index: int) -> None:
        """The gradients of a stage come into being with its first backward."""
        if index in self._have_gradients:
            return
        self._have_gradients.add(index)
        if stage.unreduced:
            self._unreduced += stage.unreduced
        else:
            self._gradients += stage.gradients

    def _reduce(self, stage: StageMemory) -> None:
        self._unreduced -= stage.unreduced
        self._gradients += stage.gradients

    def _forward(self, action: Action, stage: StageMemory) -> None:
        held = stage.activations.held_of(self._rows_of(action))
        boundary = self._boundary(action, stage)
        if not stage.first:
            self.buffers -= boundary  # the input: from now on it is among what is held
        self._hold(held)
        if stage.loss_gradient and action.stage not in self._with_loss:
            self._with_loss.add(action.stage)
            self.buffers += stage.loss_gradient
        self._see(action, workspace=stage.activations.forward_temporary * self._rows_of(action))
        if action.stage in self._gathering:
            self._gathering.discard(action.stage)
            self.buffers -= stage.gather_buffer
        self._computed(0 if stage.last else boundary)

    def _backward(self, action: Action, stage: StageMemory) -> None:
        rows = self._rows_of(action)
        held, deferred = stage.activations.held_of(rows), stage.activations.deferred * rows
        boundary = self._boundary(action, stage)
        inputs = action.kind is not Kind.BACKWARD_WEIGHT
        fresh = self._fresh(action, stage)
        workspace = fresh + (stage.activations.temporary * rows if inputs else 0)
        if action.kind is Kind.BACKWARD_INPUT and deferred > held:
            self._hold(deferred - held)
            held = deferred
        if action.stage in self._have_gradients:
            self._see(action, workspace=0)
            self._add_loss_gradient(action, stage)  # before anything else
        self._see(action, workspace)
        match action.kind:
            case Kind.BACKWARD:
                self._hold(-held)
            case Kind.BACKWARD_INPUT:
                self._hold(deferred - held)
            case _:
                self._hold(-deferred)
        # Gradients come layer by layer, while activations go: the peak is at one of the two ends.
        if action.kind is not Kind.BACKWARD_INPUT:
            self.begin_gradients(stage, action.stage)
            self._add_loss_gradient(action, stage)
        self._see(action, min(workspace, fresh + stage.activations.layer_temporary * rows))
        if inputs and not stage.last:
            self.buffers -= boundary  # the gradient of the output
        self._computed(boundary if inputs and not stage.first else 0)

    def _add_loss_gradient(self, action: Action, stage: StageMemory) -> None:
        """The gradient that was made with the loss is among the others now."""
        if action.stage in self._with_loss:
            self._with_loss.discard(action.stage)
            self.buffers -= stage.loss_gradient

    def _fresh(self, action: Action, stage: StageMemory) -> int:
        """Gradients that are made to be added to others. The first ones take their place at once."""
        match action.kind:
            case Kind.BACKWARD if action.stage in self._have_gradients:
                return stage.fresh_gradients
            case Kind.BACKWARD_INPUT:
                return stage.fresh_input_gradients
            case Kind.BACKWARD_WEIGHT:
                return stage.fresh_weight_gradients
        return 0

    def _computed(self, result: int) -> None:
        """A compute action is over: what was sent before it is through, and its own result is there."""
        self.buffers += result - self._sent
        self._sent = 0

    def _hold(self, change: int) -> None:
        self._activations += change
        self.most_activations = max(self.most_activations, self._activations)

    def _see(self, action: Action, workspace: int) -> None:
        if self._alive() + workspace > self.peak.total:
            self.peak = self._moment(str(action), workspace)

    def _alive(self) -> int:
        return (
            self._state.parameters
            + self._gradients
            + self._state.optimizer
            + self._gathered
            + self._unreduced
            + self._activations
            + self.buffers
        )

    def _moment(self, name: str, workspace: int = 0) -> Moment:
        return Moment(
            name,
            self._state.parameters,
            self._gradients,
            self._state.optimizer,
            self._gathered,
            self._unreduced,
            self._activations,
            self.buffers,
            workspace,
        )

    def _rows_of(self, action: Action) -> int:
        assert action.microbatch is not None
        return self._rows[action.microbatch]

    def _boundary(self, action: Action, stage: StageMemory) -> int:
        return stage.activations.boundary * self._rows_of(action)
