"""Rules of what is done to every layer: [activation_checkpoint] and compilation."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

from parallelisms.pipeline.errors import UnknownScheduleError
from parallelisms.pipeline.schedules import catalogue
from trainer.config.machine import visible_gpus
from trainer.config.report import Problem
from trainer.config.schema import Config

if TYPE_CHECKING:
    from trainer.config.load import Loaded


def memory_budget_needs_compile(config: Config, _world_size: int | None) -> Iterator[Problem]:
    """It is the compiler that chooses what to keep."""
    if config.activation_checkpoint.mode == "memory_budget" and not config.training.compile:
        yield Problem(
            ("activation_checkpoint.mode", "training.compile"),
            "is carried out by the compiler, and training.compile is false",
            "none, full or selective, or training.compile = true",
        )


def compiler_of_the_machine_is_there(loaded: Loaded) -> Iterator[Problem]:
    """Without a GPU, inductor writes C++ and needs somebody to compile it."""
    training = loaded.config.training
    if not training.compile or training.compile_backend != "inductor" or visible_gpus():
        return
    named = os.environ.get("CXX")
    if shutil.which(named or "g++") is None and shutil.which(named or "clang++") is None:
        yield Problem(
            ("training.compile", "training.compile_backend"),
            f"inductor needs a C++ compiler on a machine without a GPU: there is no {named or 'g++'} here",
            "false, or training.compile_backend = aot_eager",
            value=True,
        )


def compiled_layers_have_no_weight_part(config: Config) -> Iterator[str]:
    """A notice: a schedule whose weight parts are to fill its bubbles has nothing to fill them with."""
    if not config.training.compile or config.experimental.pipeline_parallel_degree == 1:
        return
    name = config.experimental.pipeline_parallel_schedule
    try:
        splits = catalogue.find(name).splits_backward
    except UnknownScheduleError:
        return
    if splits:
        yield (
            f"training.compile = true: a compiled layer computes its weight gradients together with that of its "
            f"input, so the weight parts of {name} are nearly empty and do not fill its bubbles; Interleaved1F1B "
            f"needs no weight parts"
        )
