"""Initial parameters that no layout changes: each follows from the seed and its own full name alone.

Every parameter has a random generator of its own, so neither the order in which parameters are made, nor
which of them a rank holds, nor how they are sharded makes a difference. Nothing is communicated: a rank that
holds a shard makes the whole parameter, one at a time, and keeps its part. Of stacked matrices, such as experts,
each has a generator of its own, and a rank makes only those that it holds a part of. Numbers are drawn on the
device of the parameter, in fp32.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor


@dataclass(frozen=True)
class Ones:
    """All ones."""


@dataclass(frozen=True)
class Zeros:
    """All zeros."""


@dataclass(frozen=True)
class Normal:
    """Normal with mean 0, cut off at `cutoff` standard deviations on either side (None: not cut off)."""

    std: float
    cutoff: float | None = None


@dataclass(frozen=True)
class Stacked:
    """Along the first dimension lie matrices that each are drawn by themselves, from seeds of their own."""

    each: Normal


Rule = Ones | Zeros | Normal | Stacked


@runtime_checkable
class Initialised(Protocol):
    """A model that knows how each of its parameters and buffers starts."""

    def initial(self, name: str) -> Rule:
        """The rule for the parameter or buffer of this full name."""
        ...


# What torch's own wrappers insert into names: activation checkpointing, compilation.
_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")


def full_name(name: str) -> str:
    """A parameter's name without what wrappers of its module inserted."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


@torch.no_grad()
def initialize_parameters(module: nn.Module, seed: int) -> None:
    """Give every parameter and buffer of `module` its initial value.

    Args:
        module: a model with `initial`, or one wrapped by torch's checkpoint wrapper or compiler; parameters
            are plain or DTensor, on a real device (after `to_empty`), all of the model or those of a stage.
        seed: `training.seed`.

    Raises:
        TypeError: the module has no rules.
        ValueError: a parameter or buffer is on the meta device.
    """
    rules = module
    while not isinstance(rules, Initialised):
        inner = next((child for name, child in rules.named_children() if name in _WRAPPERS), None)
        if inner is None:
            raise TypeError(f"{type(rules).__name__} has no rules for its initial parameters")
        rules = inner
    for wrapped_name, parameter in (*module.named_parameters(), *module.named_buffers()):
        name = full_name(wrapped_name)
        if parameter.is_meta:
            raise ValueError(f"{name} is on the meta device; call to_empty first")
        _fill(parameter, rules.initial(name), seed, name)


def _seed_of(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # generators take 63 bits


def _fill(parameter: Tensor, rule: Rule, seed: int, name: str) -> None:
    match rule:
        case Ones():
            parameter.fill_(1.0)
        case Zeros():
            parameter.zero_()
        case Normal():
            device = _local(parameter).device
            full = _draw(parameter.shape, rule, torch.Generator(device).manual_seed(_seed_of(seed, name)))
            _local(parameter).copy_(_part(full, parameter))
        case Stacked():
            _fill_stacked(parameter, rule.each, seed, name)


def _fill_stacked(parameter: Tensor, rule: Normal, seed: int, name: str) -> None:
    """The matrices that this rank holds a part of, one by one."""
    local, shape = _local(parameter), parameter.shape[1:]
    held = _part(torch.arange(parameter.shape[0]), parameter).tolist()
    for place, index in enumerate(held):
        generator = torch.Generator(local.device).manual_seed(_seed_of(seed, f"{name}.{index}"))
        matrix = _draw(shape, rule, generator).unsqueeze(0)
        local[place].copy_(_part(matrix, parameter, but=0).squeeze(0))


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _part(full: Tensor, parameter: Tensor, but: int | None = None) -> Tensor:
    """What this rank holds of `full` if it is laid out as the parameter, but not cut along the dimension `but`.

    Dimensions that `full` does not have are not cut either.
    """
    if not isinstance(parameter, DTensor):
        return full

    def stays(placement: Placement) -> bool:
        cut = getattr(placement, "dim", None)  # of the strided kind too, which is no Shard
        return cut is None or (cut != but and cut < full.ndim)

    placements = [placement if stays(placement) else Replicate() for placement in parameter.placements]
    # src_data_rank=None: every rank has the whole tensor and cuts out its own part.
    return distribute_tensor(full, parameter.device_mesh, placements, src_data_rank=None).to_local()


def _draw(shape: torch.Size, rule: Normal, generator: torch.Generator) -> Tensor:
    values = torch.empty(shape, dtype=torch.float32, device=generator.device)
    if rule.cutoff is None:
        return values.normal_(0.0, rule.std, generator=generator)
    bound = rule.cutoff * rule.std
    return nn.init.trunc_normal_(values, 0.0, rule.std, -bound, bound, generator=generator)
