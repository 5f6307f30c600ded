"""Doing something on all ranks so that all of them learn whether it worked everywhere."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from trainer.checkpoint.manifest import InvalidCheckpoint
from trainer.errors import ConfigurationError, StagelineError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class FailedOnSomeRank(StagelineError):
    """An action failed on at least one rank; raised on every rank, with the reason of the first of them."""


@dataclass(frozen=True)
class _Failure:
    reason: str
    kind: type[StagelineError]


class Ranks:
    """The ranks of a process group, or this process alone if there is none."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """`group`: None means all ranks if a process group has been formed."""
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def beside(self) -> Ranks:
        """The same ranks on the host, with a process group of their own: for a thread beside the training. Collective."""
        if self.group is None:
            return Ranks(None)
        return Ranks(dist.new_group(dist.get_process_group_ranks(self.group), backend="gloo"))

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, small picklable objects, on every rank."""
        if self.group is None:
            return [value]
        values: list[T] = [value] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def first(self, value: bool, device: torch.device) -> bool:
        """Rank 0's value, on every rank; cheap enough for every step."""
        if self.group is None:
            return value
        flag = torch.tensor([value], dtype=torch.uint8, device=device)
        dist.broadcast(flag, src=dist.get_global_rank(self.group, 0), group=self.group)
        return bool(flag.item())

    def agreed(self, action: Callable[[], T]) -> T:
        """Run an action on every rank and return this rank's result. The action must not communicate.

        Raises:
            ConfigurationError: on all ranks, if the action raised one on some rank.
            FailedOnSomeRank: on all ranks, if it raised another exception; its traceback is in that rank's log.
        """
        result: T
        failure: _Failure | None = None
        try:
            result = action()
        except ConfigurationError as error:
            failure = _Failure(str(error), ConfigurationError)
        except InvalidCheckpoint as error:
            failure = _Failure(f"rank {self.rank}: {error}", FailedOnSomeRank)
        except Exception as error:
            logger.exception("rank %d of the checkpoint", self.rank)
            failure = _Failure(f"rank {self.rank}: {describe(error)}", FailedOnSomeRank)
        for any_failure in self.gather(failure):
            if any_failure is not None:
                raise any_failure.kind(any_failure.reason)
        return result

    def on_first(self, action: Callable[[], T]) -> T:
        """Run an action on rank 0 alone and return its result on every rank. Raises as `agreed` does."""
        return self.gather(self.agreed(lambda: action() if self.rank == 0 else None))[0]  # type: ignore[return-value]


def describe(error: BaseException) -> str:
    """Type and message of an error, in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
