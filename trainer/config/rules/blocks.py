"""Rules of what is done to every layer: [activation_checkpoint], [float8] and compilation."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

from parallelisms.pipeline.errors import UnknownScheduleError
from parallelisms.pipeline.schedules import catalogue
from trainer.config.machine import visible_gpus
from trainer.config.report import Problem, nearest
from trainer.config.rules.model import sizes_of
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


def float8_gathers_what_has_one_scale(config: Config, _world_size: int | None) -> Iterator[Problem]:
    """Weights gathered in float8 have one scale each, and are whole but for data parallelism."""
    float8 = config.float8
    if not float8.enable_float8_linear:
        return
    gather = "float8.enable_fsdp_float8_all_gather"
    if float8.enable_fsdp_float8_all_gather and float8.recipe_name != "tensorwise":
        yield Problem(
            (gather, "float8.recipe_name"),
            f"gathers weights with one scale each, and recipe_name = {float8.recipe_name} has one for each row",
            "false, or float8.recipe_name = tensorwise",
            value=True,
        )
    if float8.enable_fsdp_float8_all_gather and config.training.tensor_parallel_degree > 1:
        yield Problem(
            (gather, "training.tensor_parallel_degree"),
            "gathers whole weights, and tensor parallelism cuts them",
            "false, or training.tensor_parallel_degree = 1",
            value=True,
        )
    if float8.precompute_float8_dynamic_scale_for_fsdp and not float8.enable_fsdp_float8_all_gather:
        yield Problem(
            ("float8.precompute_float8_dynamic_scale_for_fsdp", gather),
            "works out scales of weights that are gathered in float8",
            suggestion=f"{gather} = true",
            value=True,
        )


def float8_filters_name_something(config: Config, _world_size: int | None) -> Iterator[Problem]:
    """Each filter is a part of the name of a linear layer; otherwise it is a slip that would convert too much."""
    sizes = sizes_of(config)
    if sizes is None or not config.float8.enable_float8_linear:
        return
    names = [
        name.removesuffix(".weight") for module in sizes.modules() for name in sizes.parameter_shapes(module)
    ]
    for given in config.float8.filter_fqns:
        if given == "auto_filter_small_kn":
            if config.float8.recipe_name == "rowwise_with_gw_hp":
                yield Problem(
                    ("float8.filter_fqns", "float8.recipe_name"),
                    "auto_filter_small_kn has no measurements of rowwise_with_gw_hp",
                    "names of layers, or float8.recipe_name = rowwise",
                )
        elif not any(given in name for name in names):
            parts = {name.split(".", 2)[-1] for name in names}
            yield Problem(
                ("float8.filter_fqns", "model.name"),
                f"{given} is in no name",
                suggestion=nearest(given, parts),
            )


def float8_is_installed_and_possible(loaded: Loaded) -> Iterator[Problem]:
    """torchao is there, and a device that multiplies in float8 or emulation."""
    float8 = loaded.config.float8
    if not float8.enable_float8_linear:
        return
    key = "float8.enable_float8_linear"
    if importlib.util.find_spec("torchao") is None:
        yield Problem((key,), "torchao is not installed: pip install 'stageline[float8]'", "false")
    if not float8.emulate and not visible_gpus():
        yield Problem(
            (key, "float8.emulate"),
            "there is no GPU here, and processors have no matrix products in float8",
            "false, or float8.emulate = true",
            value=True,
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


def layers_without_a_weight_part(config: Config) -> Iterator[str]:
    """A notice: a schedule whose weight parts are to fill its bubbles has nothing to fill them with."""
    if config.experimental.pipeline_parallel_degree == 1:
        return
    if config.training.compile:
        cause = "training.compile = true: a compiled layer"
    elif config.float8.enable_float8_linear:
        cause = "float8.enable_float8_linear = true: a float8 layer"
    else:
        return
    name = config.experimental.pipeline_parallel_schedule
    try:
        splits = catalogue.find(name).splits_backward
    except UnknownScheduleError:
        return
    if splits:
        yield (
            f"{cause} computes its weight gradients together with that of its input, so the weight parts of {name} "
            f"are nearly empty and do not fill its bubbles; Interleaved1F1B needs no weight parts"
        )
