"""Where every action of a step stands: what there is, what is missing, what is there twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from parallelisms.pipeline.actions import Action, ActionLists, Kind
from parallelisms.pipeline.errors import MissingActionError, RepeatedActionError, UnknownActionError
from parallelisms.pipeline.setting import Placement

ABSENT = -1
_MOVABLE = tuple(kind for kind in Kind if kind.has_microbatch)


@dataclass
class Inventory:
    """Positions of actions in the lists of the ranks that own their stages.

    `at[kind][stage * microbatches + microbatch]` is the position in the owner's list, or ABSENT.
    """

    placement: Placement
    microbatches: int
    at: dict[Kind, list[int]] = field(default_factory=dict)

    def position(self, kind: Kind, stage: int, microbatch: int) -> int:
        return self.at[kind][stage * self.microbatches + microbatch]

    def cells(self) -> Iterator[tuple[int, int, int]]:
        """(index, stage, microbatch) of everything that each stage has to do."""
        index = 0
        for stage in range(self.placement.stages):
            for microbatch in range(self.microbatches):
                yield index, stage, microbatch
                index += 1


def take_inventory(lists: ActionLists, placement: Placement, microbatches: int) -> Inventory:
    """Find every action. Raises UnknownActionError for one that cannot be, RepeatedActionError for a second."""
    if len(lists) != placement.ranks:
        raise UnknownActionError(f"{len(lists)} lists of actions for {placement.ranks} ranks")
    if microbatches < 1:
        raise UnknownActionError(f"{microbatches} microbatches: at least 1 is needed")
    stages, owners = placement.stages, placement.owners
    inventory = Inventory(placement, microbatches)
    inventory.at = {kind: [ABSENT] * (stages * microbatches) for kind in _MOVABLE}
    for rank, actions in enumerate(lists):
        for position, action in enumerate(actions):
            stage, microbatch = action.stage, action.microbatch
            if stage >= stages or owners[stage] != rank:
                raise UnknownActionError(_wrong_stage(action, rank, placement))
            if action.chunk is not None:
                raise UnknownActionError(
                    f"rank {rank}: {action} is for a part of a sequence; only whole ones are known"
                )
            if microbatch is None:
                continue  # UNSHARD and the like may come more than once
            if not 0 <= microbatch < microbatches:
                raise UnknownActionError(
                    f"rank {rank}: {action}: microbatch {microbatch} is unknown, "
                    f"there are {microbatches} (0 to {microbatches - 1})"
                )
            row = inventory.at[action.kind]
            index = stage * microbatches + microbatch
            if row[index] != ABSENT:
                raise RepeatedActionError(
                    f"rank {rank} has {action} twice, as actions {row[index]} and {position} of its list"
                )
            row[index] = position
    return inventory


def _wrong_stage(action: Action, rank: int, placement: Placement) -> str:
    if action.stage >= placement.stages:
        return (
            f"rank {rank}: {action}: stage {action.stage} is unknown, "
            f"there are {placement.stages} (0 to {placement.stages - 1})"
        )
    owner = placement.owners[action.stage]
    return f"rank {rank}: {action}: stage {action.stage} belongs to rank {owner}"


def check_complete(inventory: Inventory, forward_only: bool) -> None:
    """Every stage does every microbatch exactly once: F, and B or I with W; for validation F alone."""
    forward, backward = inventory.at[Kind.FORWARD], inventory.at[Kind.BACKWARD]
    inputs, weights = inventory.at[Kind.BACKWARD_INPUT], inventory.at[Kind.BACKWARD_WEIGHT]
    for index, stage, microbatch in inventory.cells():
        rank = inventory.placement.owners[stage]
        whole, split = backward[index] != ABSENT, inputs[index] != ABSENT or weights[index] != ABSENT
        if forward[index] == ABSENT:
            raise MissingActionError(f"rank {rank} never runs {stage}F{microbatch}")
        if forward_only:
            if whole or split:
                raise UnknownActionError(
                    f"rank {rank} runs a backward of stage {stage}, microbatch {microbatch}, in a forward-only step"
                )
        elif whole and split:
            half = "I" if inputs[index] != ABSENT else "W"
            raise RepeatedActionError(
                f"rank {rank} has a double backward: {stage}B{microbatch} is the whole of it, "
                f"and {stage}{half}{microbatch} repeats a part"
            )
        elif not whole:
            if not split:
                raise MissingActionError(
                    f"rank {rank} never runs a backward of stage {stage}, microbatch {microbatch}: "
                    f"{stage}B{microbatch}, or {stage}I{microbatch} and {stage}W{microbatch}"
                )
            for kind, row in (("I", inputs), ("W", weights)):
                if row[index] == ABSENT:
                    raise MissingActionError(f"rank {rank} never runs {stage}{kind}{microbatch}")
