"""Setting the state of a run from a checkpoint that has been verified."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from trainer.checkpoint import folders
from trainer.checkpoint.agreement import Ranks, describe
from trainer.checkpoint.filesystem import Root
from trainer.checkpoint.manifest import InvalidCheckpoint
from trainer.checkpoint.random_state import restore_random_state
from trainer.checkpoint.state import (
    TRAIN_KEY,
    TrainState,
    allocate_optimizer_state,
    drop_optimizer_state,
    from_bytes,
    model_tensors,
    optimizer_tensors,
    restore_train_json,
    rng_key,
)
from trainer.checkpoint.storage import CheckpointReader
from trainer.errors import ConfigurationError

T = TypeVar("T")


class TensorReader(Protocol):
    """Saved tensors by section and name, such as `CheckpointReader`."""

    def names(self, section: str) -> set[str]: ...

    def read_into(self, section: str, tensors: Mapping[str, Tensor]) -> None: ...

    def mismatch(self, section: str, problems: Sequence[str]) -> ConfigurationError: ...


def choose_step(root: Root, step: int, listed: Sequence[folders.Found]) -> folders.Found:
    """The listed checkpoint of one step. Raises ConfigurationError if it is not there or not valid."""
    for found in listed:
        if found.step == step:
            if found.manifest is None:
                raise ConfigurationError(f"the checkpoint {found.folder} is not valid: {found.problem}")
            return found
    valid = ", ".join(str(found.step) for found in listed if found.manifest is not None) or "none"
    raise ConfigurationError(f"no checkpoint of step {step} in {root}; valid ones there: {valid}")


def restore_weights(reader: TensorReader, model_parts: Sequence[nn.Module], ranks: Ranks) -> None:
    """Set the parameters of all ranks. Collective. Raises ConfigurationError if they are of another model."""
    tensors = model_tensors(model_parts)
    held = set().union(*ranks.gather(set(tensors)))
    problems = [f"{name} is not in it" for name in sorted(held - reader.names("model"))]
    problems += [f"{name} is in it, not in the model" for name in sorted(reader.names("model") - held)]
    if problems:
        raise reader.mismatch("model", problems)
    ranks.agreed(lambda: _read_parts(reader, model_parts))


def restore_full(
    reader: CheckpointReader, state: TrainState, ranks: Ranks, exclude: Collection[str] = ()
) -> int:
    """Set everything but the random state; returns the step. Collective. Raises as `restore_weights`.

    `exclude`: what stays as it is, as `checkpoint.exclude_from_loading` names it.
    """
    restore_weights(reader, state.model_parts, ranks)
    if "optimizer" not in exclude:
        ranks.agreed(lambda: _restore_optimizer(reader, state))
    return ranks.agreed(
        lambda: _understood(reader, "train", TRAIN_KEY, lambda text: restore_train_json(state, text, exclude))
    )


def restore_rng(reader: CheckpointReader, ranks: Ranks, device: torch.device) -> None:
    """Set the random generators of each rank to what the rank of the same number had. Collective."""
    key = rng_key(ranks.rank)
    ranks.agreed(lambda: _understood(reader, "rng", key, lambda text: restore_random_state(text, device)))


def _understood(reader: CheckpointReader, section: str, name: str, act: Callable[[str], T]) -> T:
    """Act on a saved text. Raises InvalidCheckpoint if it is not what was written."""
    try:
        return act(from_bytes(reader.read_bytes(section, name)))
    except (ValueError, KeyError, TypeError, RuntimeError, OverflowError) as error:
        if isinstance(error, InvalidCheckpoint):
            raise
        raise InvalidCheckpoint(f"{section}.{name} cannot be understood: {describe(error)}") from error


def _read_parts(reader: TensorReader, model_parts: Sequence[nn.Module]) -> None:
    for part in model_parts:  # one by one: two may have a copy each of the same tensor
        reader.read_into("model", model_tensors([part]))


def _restore_optimizer(reader: CheckpointReader, state: TrainState) -> None:
    allocate_optimizer_state(state.optimizer)
    drop_optimizer_state(state.model_parts, state.optimizer, reader.names("optimizer"))
    for part in state.model_parts:
        reader.read_into("optimizer", optimizer_tensors([part], state.optimizer))
