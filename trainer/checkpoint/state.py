"""What a run needs to go on, and its form in a checkpoint: tensors under full names, nothing pickled.

    model.<full name>                  parameters and buffers of all parts
    optimizer.<full name>.<quantity>   e.g. optimizer.layers.0.attention.wq.weight.exp_avg
    train.state                        step, schedule, position in the data, counters: JSON as bytes
    rng.rank_<r>                       random generators of one rank: JSON as bytes

Hyperparameters of the optimizer are not saved: they are those of the configuration, in a resumed run too, and
the learning rate follows from the step. So a changed weight decay or rate in the configuration takes effect.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from parallelisms.float8 import without_float8
from trainer.checkpoint.names import full_name
from trainer.checkpoint.random_state import random_state_to_json

StateDict = dict[str, dict[str, Tensor]]

TRAIN_KEY = "state"


class Resumable(Protocol):
    """Something whose state is a small dictionary that JSON can hold, equal on all ranks."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass
class TrainState:
    """The parts of a run that change while it trains; the manager reads them and, on loading, sets them.

    Attributes:
        model_parts: the modules of this rank, whose parameters have full names.
        optimizer: over the parameters of all parts.
        schedule: the learning-rate schedule.
        data: the data loader.
        counters: what of the training loop must survive, as JSON can hold it, e.g. tokens seen; equal on all ranks.
    """

    model_parts: Sequence[nn.Module]
    optimizer: torch.optim.Optimizer
    schedule: Resumable
    data: Resumable
    counters: dict[str, Any] = field(default_factory=dict)


def model_tensors(model_parts: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Parameters and persistent buffers by full name; they share memory with the modules.

    What a part holds a copy of is there once. To set it in all parts, take the tensors of each part alone.

    Raises:
        ValueError: two parts have a tensor of the same name, so one would be lost.
    """
    tensors: dict[str, Tensor] = {}
    for part in model_parts:
        copied: frozenset[str] = getattr(part, "copied", frozenset())  # of models whose parts can hold copies
        for wrapped_name, tensor in part.state_dict().items():
            name = full_name(wrapped_name)
            if name in tensors and name not in copied:
                raise ValueError(f"two model parts have a tensor named {name}")
            tensors.setdefault(name, without_float8(tensor))
    return tensors


def optimizer_tensors(
    model_parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """The optimizer's state by full name of the parameter and quantity; shares memory with the optimizer."""
    return {
        f"{name}.{quantity}": value
        for name, parameter in _parameters(model_parts)
        for quantity, value in optimizer.state.get(parameter, {}).items()
    }


def allocate_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter its optimizer state, which otherwise exists only after the first update.

    One update with zero gradients at rate 0: it leaves the parameters as they are.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def drop_optimizer_state(
    model_parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer, saved: Set[str]
) -> None:
    """Remove the state of the parameters of which `saved` has none: they had not been updated yet."""
    for name, parameter in _parameters(model_parts):
        state = optimizer.state.get(parameter, {})
        if not any(f"{name}.{quantity}" in saved for quantity in state):
            optimizer.state.pop(parameter, None)


def full_state_dict(state: TrainState, step: int, rank: int, device: torch.device) -> StateDict:
    """What this rank writes of a full checkpoint; the part that is equal on all ranks is rank 0's to write."""
    tensors: StateDict = {
        "model": model_tensors(state.model_parts),
        "optimizer": optimizer_tensors(state.model_parts, state.optimizer),
        "rng": {rng_key(rank): to_bytes(random_state_to_json(device))},
    }
    if rank == 0:
        tensors["train"] = {TRAIN_KEY: to_bytes(train_json(state, step))}
    return tensors


def weights_state_dict(model_parts: Sequence[nn.Module], dtype: torch.dtype | None) -> StateDict:
    """What this rank writes of a weights-only checkpoint, floating-point tensors as `dtype` (None: as is)."""
    tensors = model_tensors(model_parts)
    if dtype is not None:
        tensors = {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}
    return {"model": tensors}


def train_json(state: TrainState, step: int) -> str:
    """Step, schedule, data position and counters."""
    return json.dumps(
        {
            "step": step,
            "schedule": state.schedule.state_dict(),
            "data": state.data.state_dict(),
            "counters": state.counters,
        },
        sort_keys=True,
    )


def restore_train_json(state: TrainState, text: str, exclude: Collection[str] = ()) -> int:
    """Set schedule ("lr_scheduler"), data position ("dataloader") and counters; returns the step.

    `exclude`: which of these stay as they are.
    """
    saved = json.loads(text)
    if "lr_scheduler" not in exclude:
        state.schedule.load_state_dict(saved["schedule"])
    if "dataloader" not in exclude:
        state.data.load_state_dict(saved["data"])
    state.counters.clear()
    state.counters.update(saved["counters"])
    return int(saved["step"])


def rng_key(rank: int) -> str:
    return f"rank_{rank}"


def to_bytes(text: str) -> Tensor:
    """A text as a tensor of bytes, uint8."""
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def from_bytes(tensor: Tensor) -> str:
    """The text in a tensor of bytes."""
    return tensor.numpy().tobytes().decode()


def _parameters(model_parts: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    for part in model_parts:
        for name, parameter in part.named_parameters():
            yield full_name(name), parameter
