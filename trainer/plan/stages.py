"""Which modules form which stage, which rank owns it, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from models.sizes import Sizes
from models.tied import held_count
from parallelisms.layout import Layout, Parallelism
from parallelisms.pipeline.csv import placement_of, read_csv
from parallelisms.pipeline.errors import IllegalSettingError
from parallelisms.pipeline.schedules.catalogue import find
from parallelisms.pipeline.setting import Costs, Placement
from parallelisms.pipeline.split import StageSplit, split_at, split_balanced, split_by_layers, stages_per_rank
from trainer.config.schema import Config
from trainer.plan.formats import recomputed_flops


@dataclass(frozen=True)
class StagePlan:
    """One stage: its modules, the pipeline rank that owns it, the parameters that it holds (a copied embedding is
    among them), and its share of the work."""

    index: int
    owner: int
    modules: tuple[str, ...]
    parameters: int
    flops_per_token: int  # forward and backward
    recomputed_flops_per_token: int = 0  # of forwards that activation checkpointing does again
    loss_flops_per_token: int = 0  # of gradients that are computed with the loss, in the forward


def split_modules(config: Config, sizes: Sizes, layout: Layout) -> tuple[StageSplit, Placement]:
    """The modules of each stage and where the stages sit. Raises ScheduleError."""
    experimental = config.experimental
    points = experimental.pipeline_parallel_split_points
    per_stage = experimental.pipeline_parallel_layers_per_stage
    modules = sizes.modules()
    if points or per_stage is not None:
        split = split_at(modules, points) if per_stage is None else split_by_layers(modules, per_stage)
        each = stages_per_rank(len(split.stages), layout.pipeline)
        return split, _placement(config, layout, each)
    placement = _placement(config, layout, experimental.pipeline_parallel_stages_per_rank)
    costs = [float(sizes.flops_per_token(config.training.seq_len, name)) for name in modules]
    return split_balanced(modules, costs, placement.stages), placement


def _placement(config: Config, layout: Layout, stages_per_rank: int | None) -> Placement:
    experimental = config.experimental
    if experimental.pipeline_parallel_schedule_csv is not None:
        # A file may place its stages as no schedule of the catalogue does.
        placement = placement_of(read_csv(experimental.pipeline_parallel_schedule_csv))
        if placement.ranks != layout.pipeline:
            raise IllegalSettingError(
                f"the schedule file {experimental.pipeline_parallel_schedule_csv} is for {placement.ranks} ranks, "
                f"pipeline_parallel_degree is {layout.pipeline}"
            )
        return placement
    if layout.pipeline == 1 and stages_per_rank is None:
        return Placement.looped(1, 1)
    return find(experimental.pipeline_parallel_schedule).place(layout.pipeline, stages_per_rank)


def plan_stages(
    sizes: Sizes,
    seq_len: int,
    split: StageSplit,
    placement: Placement,
    parallelism: Parallelism,
    *,
    fused_loss: bool,
) -> tuple[StagePlan, ...]:
    """The stages in order; with `fused_loss` the output's gradients are computed with the loss."""
    return tuple(
        StagePlan(
            index=index,
            owner=placement.owners[index],
            modules=names,
            parameters=held_count(sizes, names),
            flops_per_token=sum(sizes.flops_per_token(seq_len, name) for name in names),
            recomputed_flops_per_token=sum(
                recomputed_flops(sizes, name, seq_len, parallelism) for name in names
            ),
            loss_flops_per_token=sum(
                sizes.flops_per_token(seq_len, name) * 2 // 3
                for name in names
                if fused_loss and name == "output"
            ),
        )
        for index, names in enumerate(split.stages)
    )


def stage_costs(stages: Sequence[StagePlan]) -> Costs:
    """Operations of each stage for one token: forward, input gradient and weight gradient cost the same number
    in a matrix product, what is recomputed comes before the input gradient, and some gradients come with the loss."""
    forward = tuple(stage.flops_per_token / 3 + stage.loss_flops_per_token for stage in stages)
    weight = tuple(stage.flops_per_token / 3 - stage.loss_flops_per_token / 2 for stage in stages)
    again = tuple(cost + stage.recomputed_flops_per_token for cost, stage in zip(weight, stages, strict=True))
    return Costs(forward, again, weight)
