"""Rules of [training], [checkpoint] and [lr_scheduler]."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import PurePath

from parallelisms.pipeline.errors import UnknownScheduleError
from parallelisms.pipeline.schedules import catalogue
from trainer.config.report import Problem, nearest_number
from trainer.config.schema import Config

_PIPELINE = "experimental.pipeline_parallel_degree"
_REPLICATE = "training.data_parallel_replicate_degree"
_SHARD = "training.data_parallel_shard_degree"
_CONTEXT = "experimental.context_parallel_degree"
_TENSOR = "training.tensor_parallel_degree"
_GLOBAL = "training.global_batch_size"
_SLOWEST_REDUCED_BETA = 0.99


def product_of_degrees_equals_world_size(config: Config, world_size: int | None) -> Iterator[Problem]:
    """The product of all degrees is the number of processes; a shard degree of -1 takes what remains."""
    if world_size is None or data_ranks(config, world_size) is not None:
        return
    degrees = _degrees(config)
    shard = degrees[_SHARD]
    processes = f"{world_size} process{'es' if world_size > 1 else ''}"
    product = " × ".join(f"{key.partition('.')[2]} {degree}" for key, degree in degrees.items() if degree > 1)
    others = math.prod(degree for key, degree in degrees.items() if key != _SHARD)
    if shard == -1:
        message = f"{product} does not divide {processes}"
    else:
        total = f" = {others * shard}" if product.count("×") else ""
        message = f"the product of all degrees, {product or 1}{total}, is not the {processes} there are"
    # Shown first is the degree that is easiest to change: one that was set, and can be right alone.
    settable = [each for each, degree in degrees.items() if degree > 1 or (each == _SHARD and degree != -1)]
    key = next((each for each in settable if _right_alone(each, degrees, world_size)), None)
    if key is not None:
        right = _right_alone(key, degrees, world_size)
        near = nearest_number(degrees[key], right)
        allowed = " or ".join(map(str, right))
        keys = (key, *(each for each in degrees if each != key))
        yield Problem(keys, message, allowed, f"{key} = {near}", degrees[key])
    else:
        keys = tuple(sorted(degrees, key=lambda each: degrees[each] == 1))
        size = others * max(shard, 1)
        rest = "a multiple of " if shard == -1 else ""
        yield Problem(
            keys, f"{message}; start {rest}{size} processes, or change a degree", value=degrees[keys[0]]
        )


def global_batch_size_is_a_multiple_of_one_pass(config: Config, world_size: int | None) -> Iterator[Problem]:
    """A whole number of passes of batch_size sequences on every data-parallel rank gives global_batch_size."""
    training = config.training
    asked, batch_size = training.global_batch_size, training.batch_size
    ranks = data_ranks(config, world_size)
    if asked is None or ranks is None or asked % (one_pass := batch_size * ranks) == 0:
        return
    below, above = asked // one_pass * one_pass, -(-asked // one_pass) * one_pass
    yield Problem(
        (_GLOBAL, "training.batch_size", _REPLICATE, _SHARD, _PIPELINE),
        f"is no multiple of the {one_pass} sequences of one pass "
        f"(batch_size {batch_size} × {ranks} data-parallel rank{'s' if ranks > 1 else ''})",
        f"multiples of {one_pass}",
        " or ".join(str(each) for each in (below, above) if each > 0),
        asked,
    )


def gradients_are_reduced_no_coarser_than_computed(
    config: Config, _world_size: int | None
) -> Iterator[Problem]:
    """Gradients computed in float32 are not rounded to bfloat16 for their sum alone."""
    training = config.training
    if training.mixed_precision_param == "float32" and training.mixed_precision_reduce == "bfloat16":
        yield Problem(
            ("training.mixed_precision_reduce", "training.mixed_precision_param"),
            "would round gradients that mixed_precision_param = float32 computes more finely",
            "float32, or mixed_precision_param = bfloat16",
        )


def parameters_stay_for_a_split_backward(config: Config, _world_size: int | None) -> Iterator[Problem]:
    """The weight part of a backward adds to gradients that lie with gathered parameters."""
    experimental = config.experimental
    try:
        splits = catalogue.find(experimental.pipeline_parallel_schedule).splits_backward
    except UnknownScheduleError:
        return
    if splits and config.training.fsdp_reshard_after_forward == "always":
        yield Problem(
            ("training.fsdp_reshard_after_forward", "experimental.pipeline_parallel_schedule"),
            f"releases parameters before the weight parts of {experimental.pipeline_parallel_schedule}",
            "default or never, or a schedule with whole backwards, such as 1F1B",
        )


def load_step_needs_checkpoints(config: Config, _world_size: int | None) -> Iterator[Problem]:
    """A step to go on from is only read where checkpoints are enabled."""
    yield from _needs_checkpoints(config, "load_step", config.checkpoint.load_step != -1)


def seed_checkpoint_needs_checkpoints(config: Config, _world_size: int | None) -> Iterator[Problem]:
    """The initial parameters are only saved where checkpoints are enabled."""
    yield from _needs_checkpoints(config, "create_seed_checkpoint", config.checkpoint.create_seed_checkpoint)


def export_dtype_needs_model_weights_only(config: Config, _world_size: int | None) -> Iterator[Problem]:
    """A whole checkpoint keeps the numbers as they are; only weights alone are converted."""
    checkpoint = config.checkpoint
    exported = checkpoint.model_weights_only or checkpoint.last_save_in_hf
    if checkpoint.export_dtype != "float32" and not exported:
        yield Problem(
            ("checkpoint.export_dtype", "checkpoint.model_weights_only"),
            "applies only where the weights alone are saved",
            "float32, or checkpoint.model_weights_only = true",
        )


def warmup_longer_than_the_run(config: Config) -> Iterator[str]:
    """A notice: the learning rate never arrives."""
    training = config.training
    if training.warmup_steps > training.steps:
        yield (
            f"training.warmup_steps = {training.warmup_steps} is more than training.steps = {training.steps}: "
            f"the learning rate does not reach optimizer.lr"
        )


def reduced_means_that_stand_still(config: Config) -> Iterator[str]:
    """A notice: bfloat16 has 8 bits, so a mean that moves by less than 1/256 at a time does not move."""
    optimizer = config.optimizer
    if optimizer.state_dtype == "bfloat16" and max(optimizer.betas) > _SLOWEST_REDUCED_BETA:
        yield (
            f"optimizer.state_dtype = bfloat16 rounds running means to 8 bits, which optimizer.betas = "
            f"{list(optimizer.betas)} are too slow for: a mean stays where it is; 0.99 and less is right"
        )


def decay_cut_off_by_the_warmup(config: Config) -> Iterator[str]:
    """A notice: warm-up and decay together are longer than the run, and the decay gives way."""
    training, ratio = config.training, config.lr_scheduler.decay_ratio
    if ratio is None or training.warmup_steps > training.steps:
        return
    decay = round(ratio * training.steps)
    if training.warmup_steps + decay > training.steps:
        yield (
            f"training.warmup_steps = {training.warmup_steps} leaves {training.steps - training.warmup_steps} of "
            f"the {decay} steps of lr_scheduler.decay_ratio = {ratio:g}"
        )


def data_ranks(config: Config, world_size: int | None) -> int | None:
    """Ranks that read different data, or None where it is not known or the degrees do not fit the world size."""
    degrees = _degrees(config)
    replicate, shard = degrees[_REPLICATE], degrees[_SHARD]
    same_data = degrees[_PIPELINE] * degrees[_CONTEXT] * degrees[_TENSOR]
    if shard == -1:
        if world_size is None or world_size % (same_data * replicate):
            return None
        return world_size // same_data
    ranks = replicate * shard
    return ranks if world_size is None or world_size == same_data * ranks else None


def _degrees(config: Config) -> dict[str, int]:
    """The degrees whose product is the number of processes, by key."""
    training, experimental = config.training, config.experimental
    return {
        _PIPELINE: experimental.pipeline_parallel_degree,
        _REPLICATE: training.data_parallel_replicate_degree,
        _SHARD: training.data_parallel_shard_degree,
        _CONTEXT: experimental.context_parallel_degree,
        _TENSOR: training.tensor_parallel_degree,
    }


def _right_alone(key: str, degrees: dict[str, int], world_size: int) -> list[int]:
    """The values of one degree that make all fit if the others stay."""
    others = 1
    for each, degree in degrees.items():
        if each != key and degree != -1:
            others *= degree
    if world_size % others:
        return []
    rest = world_size // others
    if degrees[_SHARD] == -1 and key != _SHARD:
        return [each for each in range(1, rest + 1) if rest % each == 0]
    return [rest]


def rollback_needs_checkpoints(config: Config, _world_size: int | None) -> Iterator[Problem]:
    """There is something to go back to."""
    training, checkpoint = config.training, config.checkpoint
    for key in ("nonfinite_policy", "loss_spike_policy"):
        if getattr(training, key) == "rollback" and not checkpoint.enable_checkpoint:
            yield Problem(
                (f"training.{key}", "checkpoint.enable_checkpoint"),
                "goes back to a checkpoint, but checkpoint.enable_checkpoint is false",
                suggestion="checkpoint.enable_checkpoint = true",
                value="rollback",
            )


def files_stay_in_the_run_folder(config: Config, _world_size: int | None) -> Iterator[Problem]:
    """What is named as a folder of the run lies in it. Checkpoints may lie elsewhere, by a full path or a URL."""
    inside = (
        ("profiling.save_traces_folder", config.profiling.save_traces_folder),
        ("profiling.save_memory_snapshot_folder", config.profiling.save_memory_snapshot_folder),
        ("metrics.save_tb_folder", config.metrics.save_tb_folder),
        ("checkpoint.folder", config.checkpoint.folder),
    )
    for key, name in inside:
        path = PurePath(name)
        if ".." in path.parts or (path.is_absolute() and key != "checkpoint.folder"):
            yield Problem((key,), "leads out of the run's folder", "a path within it", path.name, name)


def spike_policy_needs_a_threshold(config: Config, _world_size: int | None) -> Iterator[Problem]:
    """What is done about spikes says nothing where no loss is one."""
    training = config.training
    if training.loss_spike_policy != "warn" and training.loss_spike_threshold is None:
        yield Problem(
            ("training.loss_spike_policy", "training.loss_spike_threshold"),
            "has no effect without training.loss_spike_threshold",
            "a number > 1",
            "training.loss_spike_threshold = 1.5",
            training.loss_spike_policy,
        )


def _needs_checkpoints(config: Config, key: str, is_set: bool) -> Iterator[Problem]:
    if is_set and not config.checkpoint.enable_checkpoint:
        yield Problem(
            (f"checkpoint.{key}", "checkpoint.enable_checkpoint"),
            "has no effect while checkpoint.enable_checkpoint is false",
            suggestion="checkpoint.enable_checkpoint = true",
        )
