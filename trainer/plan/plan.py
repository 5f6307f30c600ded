"""The plan: everything that follows from the configuration and the world size alone.

Computed before any process group exists, the same on every rank, without torch. The running half carries it
out and decides nothing that stands here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from models.registry import configured_sizes
from parallelisms.layout import Layout, Parallelism
from parallelisms.pipeline.errors import ScheduleError
from parallelisms.pipeline.factory import PipelineSchedule, build_schedule
from parallelisms.pipeline.schedules.catalogue import find
from parallelisms.pipeline.setting import Costs, Placement, Setting
from parallelisms.pipeline.split import StageSplit, split_at, split_balanced, split_by_layers, stages_per_rank
from trainer.config.schema import Config
from trainer.errors import ConfigurationError
from trainer.plan.memory import StateBytes, state_bytes
from trainer.plan.resolve import microbatches_of, resolve_layout


@dataclass(frozen=True)
class StagePlan:
    """One stage: its modules, the pipeline rank that owns it, its parameters, and its share of the work."""

    index: int
    owner: int
    modules: tuple[str, ...]
    parameters: int
    flops_per_token: int  # forward and backward


@dataclass(frozen=True)
class ValidationPlan:
    """The forward-only run over the same stages."""

    batch_size: int
    seq_len: int
    rows: tuple[int, ...]
    schedule: PipelineSchedule


@dataclass(frozen=True)
class Plan:
    """What a job will do. Tuples by stage and by pipeline rank are in order of their index."""

    model: str  # name and flavor
    sizes: Any  # the family's sizes, with the configured overrides
    layout: Layout
    parallelism: Parallelism
    stages: tuple[StagePlan, ...]
    schedule: PipelineSchedule
    batch_size: int  # sequences of one data-parallel rank in one run of the schedule
    seq_len: int
    rows: tuple[int, ...]  # sequences of each microbatch
    accumulation: int  # runs of the schedule in one step
    bytes_of_rank: tuple[StateBytes, ...]  # by pipeline rank
    validation: ValidationPlan | None
    notes: tuple[str, ...]

    @property
    def microbatches(self) -> int:
        return len(self.rows)

    @property
    def global_batch_size(self) -> int:
        """Sequences of one step."""
        return self.batch_size * self.layout.data_ranks * self.accumulation

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.seq_len

    @property
    def parameters(self) -> int:
        return sum(stage.parameters for stage in self.stages)

    @property
    def flops_per_token(self) -> int:
        """Model FLOPs of forward and backward."""
        return sum(stage.flops_per_token for stage in self.stages)

    @property
    def splits_backward(self) -> bool:
        """Whether any rank computes weight gradients apart from input gradients."""
        return any(action.kind.value == "W" for actions in self.schedule.actions for action in actions)

    def sections(self) -> dict[str, Any]:
        """The plan as plain data, by what it is about; the text of plan.json."""
        schedule = self.schedule
        return {
            "model": {
                "name": self.model,
                "sizes": asdict(self.sizes),
                "parameters": self.parameters,
                "flops_per_token": self.flops_per_token,
            },
            "mesh": dict(self.layout.dimensions),
            "parallelism": asdict(self.parallelism),
            "batch": {
                "batch_size": self.batch_size,
                "seq_len": self.seq_len,
                "microbatch_rows": list(self.rows),
                "accumulation": self.accumulation,
                "global_batch_size": self.global_batch_size,
                "tokens_per_step": self.tokens_per_step,
            },
            "stages": [asdict(stage) for stage in self.stages],
            "bytes_per_rank": [asdict(rank) for rank in self.bytes_of_rank],
            "schedule": {
                "name": schedule.name,
                "prediction": _prediction_data(schedule),
                "actions": [" ".join(map(str, actions)) for actions in schedule.actions],
            },
            "validation": None if self.validation is None else _validation_data(self.validation),
            "notes": list(self.notes),
        }

    @cached_property
    def digests(self) -> Mapping[str, str]:
        """A short digest of each section: equal on all ranks, or the job ends."""
        return {name: _digest(section) for name, section in self.sections().items()}


def make_plan(config: Config, world_size: int) -> Plan:
    """Plan a job of `world_size` ranks.

    The configuration must have passed `trainer.config.rules`. Raises ConfigurationError where what it asks for
    turns out impossible only here (a schedule that cannot be proven, for instance).
    """
    try:
        return _make_plan(config, world_size)
    except ScheduleError as error:
        raise ConfigurationError(f"[experimental]: {error}") from error


def _make_plan(config: Config, world_size: int) -> Plan:
    layout = resolve_layout(config, world_size)
    model = config.model
    sizes = configured_sizes(model.name, model.flavor, model.norm_type, model.override)
    split, placement = _split(config, sizes, layout)
    stages = _stages(config, sizes, split, placement)
    batch_size = config.training.batch_size
    microbatches, notes = microbatches_of(config, placement.stages)
    parallelism = _parallelism(config, layout)
    schedule = _schedule(config, placement, stages, microbatches, parallelism, forward_only=False)
    return Plan(
        model=f"{config.model.name} {config.model.flavor}",
        sizes=sizes,
        layout=layout,
        parallelism=parallelism,
        stages=stages,
        schedule=schedule,
        batch_size=batch_size,
        seq_len=config.training.seq_len,
        rows=split_rows(batch_size, microbatches),
        accumulation=_accumulation(config, layout),
        bytes_of_rank=tuple(
            state_bytes([stages[stage].parameters for stage in placement.stages_of(rank)], layout)
            for rank in range(layout.pipeline)
        ),
        validation=_validation(config, placement, stages, microbatches, parallelism),
        notes=notes,
    )


def split_rows(batch_size: int, microbatches: int) -> tuple[int, ...]:
    """Sequences of each microbatch, as equal as possible, the larger ones first."""
    each, more = divmod(batch_size, microbatches)
    return tuple(each + (index < more) for index in range(microbatches))


def _split(config: Config, sizes: Any, layout: Layout) -> tuple[StageSplit, Placement]:
    """Which modules form which stage, and which rank owns it."""
    experimental = config.experimental
    points = experimental.pipeline_parallel_split_points
    per_stage = experimental.pipeline_parallel_layers_per_stage
    schedule = find(experimental.pipeline_parallel_schedule)
    modules = sizes.modules()
    if points or per_stage is not None:
        split = split_at(modules, points) if per_stage is None else split_by_layers(modules, per_stage)
        return split, schedule.place(layout.pipeline, stages_per_rank(len(split.stages), layout.pipeline))
    each = experimental.pipeline_parallel_stages_per_rank
    alone = layout.pipeline == 1 and each is None
    placement = Placement.looped(1, 1) if alone else schedule.place(layout.pipeline, each)
    costs = [float(sizes.flops_per_token(config.training.seq_len, name)) for name in modules]
    return split_balanced(modules, costs, placement.stages), placement


def _stages(config: Config, sizes: Any, split: StageSplit, placement: Placement) -> tuple[StagePlan, ...]:
    seq_len = config.training.seq_len
    return tuple(
        StagePlan(
            index=index,
            owner=placement.owners[index],
            modules=names,
            parameters=sum(sizes.parameter_count(name) for name in names),
            flops_per_token=sum(sizes.flops_per_token(seq_len, name) for name in names),
        )
        for index, names in enumerate(split.stages)
    )


def _schedule(
    config: Config,
    placement: Placement,
    stages: tuple[StagePlan, ...],
    microbatches: int,
    parallelism: Parallelism,
    *,
    forward_only: bool,
) -> PipelineSchedule:
    # Forward, input and weight gradient cost the same number of operations in a matrix product.
    third = tuple(stage.flops_per_token / 3 for stage in stages)
    limit = config.experimental.pipeline_parallel_memory_limit
    return build_schedule(
        config.experimental.pipeline_parallel_schedule,
        Setting(placement, microbatches, Costs(third, third, third), limit),
        csv=config.experimental.pipeline_parallel_schedule_csv,
        sharded=parallelism.sharded and parallelism.keep_gathered,
        forward_only=forward_only,
    )


def _parallelism(config: Config, layout: Layout) -> Parallelism:
    training = config.training
    reduced_precision = "bfloat16" in (training.mixed_precision_param, training.mixed_precision_reduce)
    splits = find(config.experimental.pipeline_parallel_schedule).splits_backward
    return Parallelism(
        sharded=layout.data_ranks > 1 or reduced_precision or training.enable_cpu_offload,
        keep_gathered=layout.pipeline > 1 or splits,
        cpu_offload=training.enable_cpu_offload,
        checkpointing=config.activation_checkpoint.mode,
        checkpointing_option=config.activation_checkpoint.selective_ac_option,
    )


def _accumulation(config: Config, layout: Layout) -> int:
    asked = config.training.global_batch_size
    return 1 if asked is None else asked // (config.training.batch_size * layout.data_ranks)


def _validation(
    config: Config,
    placement: Placement,
    stages: tuple[StagePlan, ...],
    microbatches: int,
    parallelism: Parallelism,
) -> ValidationPlan | None:
    if not config.validation.enable:
        return None
    batch_size = config.validation.batch_size or config.training.batch_size
    rows = split_rows(batch_size, min(microbatches, batch_size))
    return ValidationPlan(
        batch_size=batch_size,
        seq_len=config.validation.seq_len or config.training.seq_len,
        rows=rows,
        schedule=_schedule(config, placement, stages, len(rows), parallelism, forward_only=True),
    )


def _prediction_data(schedule: PipelineSchedule) -> dict[str, Any]:
    prediction = schedule.prediction
    return {
        "step": prediction.step,
        "bound": prediction.bound,
        "step_bubble": prediction.step_bubble,
        "peak_activations": list(prediction.peak_activations),
    }


def _validation_data(validation: ValidationPlan) -> dict[str, Any]:
    return {
        "batch_size": validation.batch_size,
        "seq_len": validation.seq_len,
        "microbatch_rows": list(validation.rows),
        "actions": [" ".join(map(str, actions)) for actions in validation.schedule.actions],
    }


def _digest(section: Any) -> str:
    return hashlib.sha256(json.dumps(section, sort_keys=True).encode()).hexdigest()[:16]
