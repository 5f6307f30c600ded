"""The plan: everything that follows from the configuration and the world size alone.

Computed before any process group exists, the same on every rank, without torch. The running half carries it
out and decides nothing that stands here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from models.registry import configured_sizes
from models.tied import copies_embedding
from parallelisms.layout import Float8, Layout, Parallelism
from parallelisms.pipeline.actions import Kind
from parallelisms.pipeline.errors import ScheduleError
from parallelisms.pipeline.factory import PipelineSchedule, build_schedule
from parallelisms.pipeline.schedules.catalogue import find
from parallelisms.pipeline.setting import Costs, Placement, Setting
from trainer.config.schema import Config
from trainer.errors import ConfigurationError
from trainer.plan.attention import AttentionPlan
from trainer.plan.formats import Formats, number_bytes
from trainer.plan.resolve import microbatches_of, resolve_layout
from trainer.plan.stages import StagePlan, plan_stages, split_modules, stage_costs
from trainer.plan.state import Moments, StageParameters, StateBytes, state_bytes

__all__ = ["Plan", "StagePlan", "ValidationPlan", "make_plan", "moments_of", "split_rows", "state_of_ranks"]


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
    moments: Moments  # of the optimizer
    bytes_of_rank: tuple[StateBytes, ...]  # by pipeline rank
    validation: ValidationPlan | None
    notes: tuple[str, ...]
    formats: Formats
    attention: AttentionPlan
    steps: int  # of the whole run
    costs: Costs  # of each stage, with which the schedule is timed
    measured_costs: bool  # whether they are seconds that were measured, not FLOPs per token
    loss_chunk: int | None  # tokens whose logits there are at a time; None: those of a whole microbatch

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
    def rank_seq_len(self) -> int:
        """Tokens of a sequence that one context rank has."""
        return self.seq_len // self.layout.context

    @cached_property
    def parameters(self) -> int:
        """Of the model: a matrix of which two stages hold a copy counts once."""
        count: int = self.sizes.parameter_count()
        return count

    @property
    def tied_owners(self) -> tuple[int, int] | None:
        """The pipeline ranks that own the embedding and a copy of it in another stage; None: there is no copy."""
        if not copies_embedding(self.sizes, self.stages[-1].modules):
            return None
        return self.stages[0].owner, self.stages[-1].owner

    @property
    def flops_per_token(self) -> int:
        """Model FLOPs of forward and backward."""
        return sum(stage.flops_per_token for stage in self.stages)

    @property
    def recomputed_flops_per_token(self) -> int:
        """FLOPs of forwards that activation checkpointing does again; not among the model's."""
        return sum(stage.recomputed_flops_per_token for stage in self.stages)

    @property
    def flops_per_step(self) -> int:
        """Model FLOPs of a step, over all ranks."""
        return self.flops_per_token * self.tokens_per_step

    @property
    def mfu_ceiling(self) -> float:
        """The model FLOPs utilisation if every kernel ran at the peak: what the bubble and what is recomputed
        leave of it."""
        useful = self.flops_per_token / (self.flops_per_token + self.recomputed_flops_per_token)
        return (1 - self.schedule.prediction.step_bubble) * useful

    @property
    def splits_backward(self) -> bool:
        """Whether any rank computes weight gradients apart from input gradients."""
        return any(
            action.kind is Kind.BACKWARD_WEIGHT for actions in self.schedule.actions for action in actions
        )

    def sections(self) -> dict[str, Any]:
        """The plan as plain data, by what it is about; the text of plan.json."""
        from trainer.plan.sections import sections_of

        return sections_of(self)

    @cached_property
    def digests(self) -> Mapping[str, str]:
        """A short digest of each section: equal on all ranks, or the job ends."""
        return {name: _digest(section) for name, section in self.sections().items()}


# Makes schedules: `build_schedule`, or something that remembers what that made.
Builder = Callable[..., PipelineSchedule]


def make_plan(
    config: Config, world_size: int, *, costs: Costs | None = None, build: Builder = build_schedule
) -> Plan:
    """Plan a job of `world_size` ranks.

    The configuration must have passed `trainer.config.rules`. Raises ConfigurationError where what it asks for
    turns out impossible only here (a schedule that cannot be proven, for instance).

    Args:
        config: the configuration.
        world_size: ranks of the job.
        costs: of each stage, measured; None: from the operations that it has to do.
        build: makes the schedules.
    """
    try:
        return _make_plan(config, world_size, costs, build)
    except ScheduleError as error:
        raise ConfigurationError(f"[experimental]: {error}") from error


def _make_plan(config: Config, world_size: int, costs: Costs | None, build: Builder) -> Plan:
    training = config.training
    layout = resolve_layout(config, world_size)
    model = config.model
    sizes = configured_sizes(model.name, model.flavor, model.norm_type, model.override)
    split, placement = split_modules(config, sizes, layout)
    parallelism = _parallelism(config, layout)
    loss_chunk = _loss_chunk(config, layout)
    stages = plan_stages(
        sizes, training.seq_len, split, placement, parallelism, fused_loss=loss_chunk is not None
    )
    microbatches, notes = microbatches_of(config, placement.stages)
    if microbatches > training.batch_size:  # of a schedule file; a rule looks at those that are configured
        raise ConfigurationError(
            f"the schedule has {microbatches} microbatches, training.batch_size is {training.batch_size}; "
            f"it must be {microbatches} or more"
        )
    scheduler = _Scheduler(config, placement, _costs(costs, stages), parallelism, build)
    return Plan(
        model=f"{config.model.name} {config.model.flavor}",
        sizes=sizes,
        layout=layout,
        parallelism=parallelism,
        stages=stages,
        schedule=scheduler.schedule(microbatches),
        batch_size=training.batch_size,
        seq_len=training.seq_len,
        rows=split_rows(training.batch_size, microbatches),
        accumulation=_accumulation(config, layout),
        moments=moments_of(config),
        bytes_of_rank=state_of_ranks(sizes, stages, placement, layout, moments_of(config)),
        validation=_validation(config, microbatches, scheduler),
        notes=notes,
        formats=Formats(training.mixed_precision_param, training.mixed_precision_reduce),
        attention=AttentionPlan(
            model.attention, config.data.mask_documents, getattr(sizes, "sliding_window", None)
        ),
        steps=training.steps,
        costs=scheduler.costs,
        measured_costs=costs is not None,
        loss_chunk=loss_chunk,
    )


def state_of_ranks(
    sizes: Any,
    stages: tuple[StagePlan, ...],
    placement: Placement,
    layout: Layout,
    moments: Moments,
) -> tuple[StateBytes, ...]:
    """The training state of the ranks at each place of the pipeline."""
    parameters = [StageParameters.of(sizes, stage.modules, layout, moments) for stage in stages]
    return tuple(
        state_bytes([parameters[stage] for stage in placement.stages_of(rank)])
        for rank in range(layout.pipeline)
    )


def split_rows(batch_size: int, microbatches: int) -> tuple[int, ...]:
    """Sequences of each microbatch, as equal as possible, the larger ones first."""
    each, more = divmod(batch_size, microbatches)
    return tuple(each + (index < more) for index in range(microbatches))


@dataclass(frozen=True)
class _Scheduler:
    """Makes the schedules of one configuration."""

    config: Config
    placement: Placement
    costs: Costs
    parallelism: Parallelism
    build: Builder

    def schedule(self, microbatches: int, *, forward_only: bool = False) -> PipelineSchedule:
        experimental = self.config.experimental
        return self.build(
            experimental.pipeline_parallel_schedule,
            Setting(self.placement, microbatches, self.costs, experimental.pipeline_parallel_memory_limit),
            csv=experimental.pipeline_parallel_schedule_csv,
            sharded=self.parallelism.sharded and self.parallelism.keep_gathered,
            forward_only=forward_only,
        )


def _costs(measured: Costs | None, stages: tuple[StagePlan, ...]) -> Costs:
    if measured is None:
        return stage_costs(stages)
    if len(measured.forward) != len(stages):
        raise ConfigurationError(
            f"the measured costs are those of {len(measured.forward)} stages, and the plan has {len(stages)}: "
            "measure with the stages that are to be planned"
        )
    return measured


def _parallelism(config: Config, layout: Layout) -> Parallelism:
    training = config.training
    reduced_precision = "bfloat16" in (training.mixed_precision_param, training.mixed_precision_reduce)
    splits = find(config.experimental.pipeline_parallel_schedule).splits_backward
    policy = training.fsdp_reshard_after_forward
    return Parallelism(
        sharded=layout.replicate * layout.sharding_ranks > 1
        or reduced_precision
        or training.enable_cpu_offload,
        keep_gathered=policy == "never" or (policy == "default" and (layout.pipeline > 1 or splits)),
        release_always=policy == "always",
        cpu_offload=training.enable_cpu_offload,
        overlap_tensor=config.experimental.enable_async_tensor_parallel,
        loss_parallel=not training.disable_loss_parallel,
        checkpointing=config.activation_checkpoint.mode,
        checkpointing_option=config.activation_checkpoint.selective_ac_option,
        checkpointing_budget=config.activation_checkpoint.memory_budget,
        compile_backend=training.compile_backend if training.compile else None,
        float8=_float8(config),
        rotate_method=config.experimental.context_parallel_rotate_method,
        balanced_context=config.experimental.context_parallel_load_balancer == "headtail",
    )


def _loss_chunk(config: Config, layout: Layout) -> int | None:
    # Gathered logits are those of all tokens.
    gathers = layout.tensor > 1 and config.training.disable_loss_parallel
    return config.training.loss_chunk if config.training.fused_loss and not gathers else None


def _float8(config: Config) -> Float8 | None:
    table = config.float8
    if not table.enable_float8_linear:
        return None
    return Float8(
        recipe=table.recipe_name,
        filters=table.filter_fqns,
        gather=table.enable_fsdp_float8_all_gather,
        precompute=table.precompute_float8_dynamic_scale_for_fsdp,
        emulate=table.emulate,
    )


def moments_of(config: Config) -> Moments:
    """What the configured optimizer keeps."""
    optimizer = config.optimizer
    return Moments(number_bytes(optimizer.state_dtype), muon=optimizer.name == "Muon")


def _accumulation(config: Config, layout: Layout) -> int:
    asked = config.training.global_batch_size
    return 1 if asked is None else asked // (config.training.batch_size * layout.data_ranks)


def _validation(config: Config, microbatches: int, scheduler: _Scheduler) -> ValidationPlan | None:
    if not config.validation.enable:
        return None
    batch_size = config.validation.batch_size or config.training.batch_size
    rows = split_rows(batch_size, min(microbatches, batch_size))
    return ValidationPlan(
        batch_size=batch_size,
        seq_len=config.validation.seq_len or config.training.seq_len,
        rows=rows,
        schedule=scheduler.schedule(len(rows), forward_only=True),
    )


def _digest(section: Any) -> str:
    return hashlib.sha256(json.dumps(section, sort_keys=True).encode()).hexdigest()[:16]
