"""Rules of tensor parallelism: what it divides must be divisible."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from parallelisms.tensor_plan import UnknownParameterError, undivided
from trainer.config.machine import Machine, this_machine
from trainer.config.report import Problem, either, nearest_number
from trainer.config.rules.model import sizes_of
from trainer.config.schema import Config

_DEGREE = "training.tensor_parallel_degree"
_ASYNC = "experimental.enable_async_tensor_parallel"
_CONTEXT = "experimental.context_parallel_degree"


def tensor_parallel_degree_divides_the_model(config: Config, _world_size: int | None) -> Iterator[Problem]:
    """Heads, widths and the vocabulary can be divided over the ranks of a tensor group."""
    degree, sizes = config.training.tensor_parallel_degree, sizes_of(config)
    if degree == 1 or sizes is None:
        return
    try:
        reasons = undivided(sizes, degree)
    except UnknownParameterError as error:
        yield Problem((_DEGREE, "model.name"), str(error), "1", value=degree)
        return
    if reasons:
        right = [each for each in range(1, max(degree, _most(sizes)) + 1) if not undivided(sizes, each)]
        overridden = [f"model.override.{name}" for name in reasons if name in config.model.override]
        yield Problem(
            (_DEGREE, *overridden, "model.flavor", "model.name"),
            "; ".join(reasons.values()),
            either(right),
            str(nearest_number(degree, right)),
            degree,
        )


def tensor_parallel_degree_divides_the_sequence(config: Config, _world_size: int | None) -> Iterator[Problem]:
    """Between the blocks of a layer each rank of a tensor group has an equal part of its sequences."""
    tensor, context = config.training.tensor_parallel_degree, config.experimental.context_parallel_degree
    if tensor == 1:
        return
    parts = tensor * context
    lengths = {"training.seq_len": config.training.seq_len}
    if config.validation.enable and config.validation.seq_len is not None:
        lengths["validation.seq_len"] = config.validation.seq_len
    for key, length in lengths.items():
        if length % parts == 0:
            continue
        product = f"tensor_parallel_degree {tensor}"
        if context > 1:
            product += f" × context_parallel_degree {context}"
        below, above = length // parts * parts, -(-length // parts) * parts
        yield Problem(
            (key, _DEGREE, _CONTEXT),
            f"is not divisible by {product}",
            f"multiples of {parts}",
            " or ".join(str(each) for each in (below, above) if each > 0),
            length,
        )


def async_tensor_parallel_is_compiled(config: Config, _world_size: int | None) -> Iterator[Problem]:
    """It is the compiler that overlaps products with what the ranks of a tensor group exchange."""
    training = config.training
    if not config.experimental.enable_async_tensor_parallel:
        return
    if training.tensor_parallel_degree == 1:
        message, key, right = "has nothing to overlap without tensor parallelism", _DEGREE, "2 or more"
    elif not training.compile:
        message, key, right = "is carried out by the compiler", "training.compile", "true"
    elif training.compile_backend != "inductor":
        message, key, right = "is carried out by inductor alone", "training.compile_backend", '"inductor"'
    else:
        return
    yield Problem((_ASYNC, key), message, f"false, or {key} = {right}", value=True)


def async_tensor_parallel_has_a_device_for_it(
    config: Config, machine: Machine | None = None
) -> Iterator[Problem]:
    """The ranks of a group write into each other's memory, which CUDA devices can; `machine` is for tests."""
    if config.experimental.enable_async_tensor_parallel and not (machine or this_machine()).gpus:
        yield Problem((_ASYNC,), "needs CUDA devices, and there is none here", "false", value=True)


def _most(sizes: Any) -> int:
    return int(getattr(sizes, "n_heads", 1))
