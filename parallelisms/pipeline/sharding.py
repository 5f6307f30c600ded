"""Stages whose parameters are sharded over data-parallel ranks: where to gather, release and reduce, and proof.

UNSHARD stands one compute action before the stage's first forward, so that the gathering overlaps with it;
REDUCE_GRAD and RESHARD stand after the stage's last backward and what that sends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from parallelisms.pipeline.actions import Action, ActionLists, Kind
from parallelisms.pipeline.errors import ShardingError


@dataclass
class _Stage:
    gathered: bool = False
    reduced: bool = False


def add_sharding(lists: ActionLists) -> ActionLists:
    """Lists of compute actions and transfers, completed for sharded stages. In validation nothing is reduced."""
    return tuple(tuple(_with_sharding(actions)) for actions in lists)


def _with_sharding(actions: tuple[Action, ...]) -> Iterator[Action]:
    gather: dict[int, list[Action]] = {}  # before which position
    last: dict[int, int] = {}  # of each stage: position of the last action that needs or makes anything
    trained = {
        action.stage for action in actions if action.kind.is_compute and action.kind is not Kind.FORWARD
    }
    slot: int | None = None
    for position, action in enumerate(actions):
        if action.kind.is_compute:
            if action.stage not in last:
                gather.setdefault(position if slot is None else slot, []).append(
                    Action(action.stage, Kind.UNSHARD)
                )
            slot = position
        if action.kind.is_compute or action.kind.is_send:
            last[action.stage] = position
    for position, action in enumerate(actions):
        yield from gather.get(position, ())
        yield action
        if last.get(action.stage) == position:
            if action.stage in trained:
                yield Action(action.stage, Kind.REDUCE_GRADIENT)
            yield Action(action.stage, Kind.RESHARD)


def check_sharding(lists: ActionLists, forward_only: bool, sharded: bool | None) -> None:
    """Raise ShardingError unless parameters are gathered while a stage computes, released at the end, and the
    gradients reduced once, after the last backward.

    Args:
        lists: every action of every rank.
        forward_only: nothing is to be reduced.
        sharded: whether parameters are sharded; None: they are if the lists say so anywhere.
    """
    if not sharded:
        found = next((each for actions in lists for each in actions if not each.kind.has_microbatch), None)
        if found is None:
            return
        if sharded is False:
            raise ShardingError(f"{found} in the lists, but parameters are not sharded")
    for rank, actions in enumerate(lists):
        stages: dict[int, _Stage] = {}
        for action in actions:
            _step(rank, action, stages.setdefault(action.stage, _Stage()), forward_only)
        for stage, state in stages.items():
            if state.gathered:
                raise ShardingError(
                    f"rank {rank} never releases the parameters of stage {stage}: {stage}RESHARD is missing"
                )
            if not state.reduced and not forward_only:
                raise ShardingError(
                    f"rank {rank} never reduces the gradients of stage {stage}: {stage}REDUCE_GRAD is missing"
                )


def _step(rank: int, action: Action, stage: _Stage, forward_only: bool) -> None:
    kind = action.kind
    if kind is Kind.UNSHARD or kind is Kind.RESHARD:
        if stage.gathered == (kind is Kind.UNSHARD):
            state = "gathered" if stage.gathered else "released"
            raise ShardingError(f"rank {rank}: {action}: the parameters are already {state}")
        stage.gathered = not stage.gathered
    elif kind is Kind.REDUCE_GRADIENT:
        if stage.reduced:
            raise ShardingError(f"rank {rank} has {action} twice")
        if forward_only:
            raise ShardingError(f"rank {rank} has {action} in a forward-only step")
        stage.reduced = True
    elif kind.is_compute:
        if not stage.gathered:
            raise ShardingError(f"rank {rank} runs {action} while the parameters of its stage are sharded")
        if stage.reduced and kind is not Kind.FORWARD:
            raise ShardingError(f"rank {rank} runs {action} after the gradients were reduced")
