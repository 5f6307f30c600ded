"""The optimizer over all model parts of a rank, and its learning-rate schedule.

Weight decay acts on matrices only: embeddings, attention, feed-forward and output weights (as GPT-2, GPT-3 and
nanoGPT do). Norms and biases are never decayed: pulling a norm's gain to 0 only rescales what the next matrix
undoes, and hurts. torchtitan decays everything; a run that compares with one of its runs differs in this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainer.checkpoint.names import full_name
from trainer.errors import ConfigurationError
from trainer.lr_schedule import LearningRateShape, Schedule
from trainer.muon import Muon
from trainer.reduced_adam import ReducedAdam

if TYPE_CHECKING:
    from trainer.config.schema import Config, Optimizer

_STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Devices for which torch has fused Adam kernels; they take FSDP2's DTensor parameters too.
_FUSED_DEVICES = frozenset({"cpu", "cuda", "xpu", "mps"})


def build_optimizer(
    model_parts: Sequence[nn.Module], config: Optimizer, device: torch.device
) -> torch.optim.Optimizer:
    """One optimizer over the parameters of all parts (the pipeline stages of this rank).

    Its groups are named under the key "name": "decay" and "no_decay", and before them "hidden" with Muon, which
    updates those itself; one without parameters is left out. `config` is the table [optimizer]; `device` is where
    the parameters are (the CPU if they are offloaded).

    Raises:
        ConfigurationError: fused is asked for and the device has no fused kernel.
    """
    hidden: list[nn.Parameter] = []
    decay: list[nn.Parameter] = []
    no_decay: list[nn.Parameter] = []
    for name, parameter in trainable_parameters(model_parts):
        if config.name == "Muon" and is_hidden_matrix(name, parameter):
            hidden.append(parameter)
        else:
            (decay if is_decayed(name, parameter) else no_decay).append(parameter)
    groups = [
        {"name": "decay", "params": decay, "weight_decay": config.weight_decay},
        {"name": "no_decay", "params": no_decay, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    adam = _build_adam(groups, config, device) if groups else None
    if not hidden:
        assert adam is not None, "nothing to train"
        return adam
    return Muon(
        [{"name": "hidden", "params": hidden, "weight_decay": config.weight_decay}],
        adam,
        lr=config.lr,
        momentum=config.muon_momentum,
        scaling=config.muon_scale,
        state_dtype=_STATE_DTYPES[config.state_dtype],
    )


def _build_adam(
    groups: list[dict[str, Any]], config: Optimizer, device: torch.device
) -> torch.optim.Optimizer:
    """AdamW, or Adam if that is the configured one."""
    betas = (config.betas[0], config.betas[1])
    implementation = _implementation(config.fused, device)
    if config.state_dtype != "float32":
        return ReducedAdam(
            groups,
            lr=config.lr,
            betas=betas,
            eps=config.eps,
            decoupled=config.name != "Adam",
            state_dtype=_STATE_DTYPES[config.state_dtype],
            fused=implementation.get("fused", False),
        )
    adam = torch.optim.Adam if config.name == "Adam" else torch.optim.AdamW
    return adam(groups, lr=config.lr, betas=betas, eps=config.eps, **implementation)


def build_lr_schedule(optimizer: torch.optim.Optimizer, config: Config) -> Schedule:
    """The schedule that the tables [optimizer], [lr_scheduler] and [training] describe."""
    shape = LearningRateShape(
        steps=config.training.steps,
        warmup_steps=config.training.warmup_steps,
        decay_ratio=config.lr_scheduler.decay_ratio,
        decay_type=config.lr_scheduler.decay_type,
        min_factor=config.lr_scheduler.min_lr_factor,
    )
    return Schedule(optimizer, config.optimizer.lr, shape)


def is_decayed(name: str, parameter: torch.Tensor) -> bool:
    """Whether weight decay acts on a parameter: on matrices, unless a bias or in a norm by its name.

    The dimension alone would decay what is stacked: the biases of all experts of a layer are a matrix.
    """
    *modules, own_name = name.split(".")
    return parameter.ndim >= 2 and own_name != "bias" and not any("norm" in module for module in modules)


def is_hidden_matrix(name: str, parameter: torch.Tensor) -> bool:
    """Whether a parameter is a matrix (or a stack of them) that maps hidden states to hidden states: in a layer."""
    return name.startswith("layers.") and is_decayed(name, parameter)


def trainable_parameters(model_parts: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Full name and parameter of everything that is trained; a tied parameter once, by its first name."""
    for part in model_parts:
        for name, parameter in part.named_parameters():
            if parameter.requires_grad:
                yield full_name(name), parameter


def _implementation(fused: bool | None, device: torch.device) -> dict[str, bool]:
    """The fused kernel where there is one, else one launch per operation over all tensors (foreach)."""
    available = device.type in _FUSED_DEVICES
    if fused and not available:
        raise ConfigurationError(
            f"optimizer.fused = true: there is no fused optimizer for the device {device.type!r}; "
            f"devices that have one: {', '.join(sorted(_FUSED_DEVICES))}"
        )
    return {"fused": True} if available and fused is not False else {"foreach": True}
