"""Builds the running half of a job from its plan: model stages, optimizer, data, checkpoints, executors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from models.initialize import initialize_parameters
from models.layers.attend import use_attention_kernel
from models.registry import family
from parallelisms.apply import apply_parallelisms, sequence_cut
from parallelisms.collectives import Group
from parallelisms.context.cut import SequenceCut
from parallelisms.data import Precision, ShardedStage
from parallelisms.float8 import NoFloat8Error
from parallelisms.mesh import Meshes, build_meshes
from parallelisms.pipeline.channels import Channels
from parallelisms.pipeline.execute import Boundary, Executor, Observer
from parallelisms.pipeline.factory import PipelineSchedule
from parallelisms.pipeline.stage import Stage
from parallelisms.pipeline.tied import TiedEmbedding
from trainer.config.schema import Config
from trainer.errors import ConfigurationError
from trainer.plan.plan import Plan
from trainer.process import RankProcess

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Pipeline:
    """This rank's share of the model and what runs it."""

    meshes: Meshes
    stages: dict[int, Stage]
    executor: Executor
    evaluator: Executor | None  # forward only, where the configuration validates
    vocabulary: Group | None = None  # the ranks among which the logits' vocabulary is divided
    sequence_cut: SequenceCut | None = None  # what this rank has of every sequence, with context parallelism
    tied: TiedEmbedding | None = None  # on the ranks that hold a matrix of which two stages have a copy

    @property
    def parts(self) -> list[nn.Module]:
        """The module of each stage."""
        return [stage.module for stage in self.stages.values()]

    def distinct_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of all parts, without the second copy of a matrix that two stages have."""
        copy = None if self.tied is None else self.tied.copy
        for part in self.parts:
            yield from (parameter for parameter in part.parameters() if parameter is not copy)


def build_pipeline(config: Config, plan: Plan, process: RankProcess, observer: Observer) -> Pipeline:
    """Collective over all ranks: mesh, stages with initial parameters, executors that tell `observer`."""
    meshes = build_meshes(plan.layout, process.device.type)
    stages = {
        index: _build_stage(index, config, plan, process, meshes)
        for index in plan.schedule.placement.stages_of(plan.layout.pipeline_rank(process.rank))
    }
    executor = _build_executor(plan.schedule, plan.seq_len, stages, config, plan, process, observer)
    cut = sequence_cut(meshes, plan.parallelism)
    tied = _tied_embedding(stages, config, plan, process)
    divided = plan.layout.tensor > 1 and plan.parallelism.loss_parallel
    vocabulary = Group.of(meshes.tensor) if divided else None
    if plan.validation is None:
        return Pipeline(meshes, stages, executor, None, vocabulary, cut, tied)
    seq_len = plan.validation.seq_len
    schedule = plan.validation.schedule
    evaluator = _build_executor(schedule, seq_len, stages, config, plan, process, process.progress)
    return Pipeline(meshes, stages, executor, evaluator, vocabulary, cut, tied)


def build_model(config: Config, plan: Plan, modules: tuple[str, ...]) -> nn.Module:
    """The named modules, on the meta device."""
    with torch.device("meta"):
        return family(config.model.name).build(plan.sizes, modules)


def _build_stage(index: int, config: Config, plan: Plan, process: RankProcess, meshes: Meshes) -> Stage:
    planned = plan.stages[index]
    module = build_model(config, plan, planned.modules)
    masked = config.data.mask_documents
    use_attention_kernel(module, config.model.attention, process.device, documents_are_masked=masked)
    try:
        sharding: ShardedStage | None = apply_parallelisms(
            module, meshes, plan.parallelism, config_precision(config)
        )
    except NoFloat8Error as error:
        raise ConfigurationError(
            f"float8.enable_float8_linear = true: {error}; float8.emulate = true works anywhere"
        ) from error
    # Sharded first, filled afterwards: no rank ever holds a whole stage that is sharded.
    offloaded = config.training.enable_cpu_offload
    module.to_empty(device="cpu" if offloaded else process.device)
    initialize_parameters(module, config.training.seed)
    move_buffers(module, process.device)  # FSDP brings only parameters to where the model computes
    module.train()
    return Stage(
        index,
        module,
        last=index == len(plan.stages) - 1,
        split_backward=plan.splits_backward,
        sharding=sharding,
        loss_chunk=plan.loss_chunk,
    )


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move all buffers of a module to a device, and leave its parameters where they are."""
    for child in module.modules():
        for name, buffer in child._buffers.items():
            child._buffers[name] = None if buffer is None else buffer.to(device)


def _build_executor(
    schedule: PipelineSchedule,
    seq_len: int,
    stages: dict[int, Stage],
    config: Config,
    plan: Plan,
    process: RankProcess,
    observer: Observer,
) -> Executor:
    rank = plan.layout.pipeline_rank(process.rank)
    members = plan.layout.pipeline_of(process.rank)
    channels = Channels(schedule.actions, schedule.placement, members, rank, process.device)
    precision = config_precision(config)
    part = seq_len // (plan.layout.context * plan.layout.tensor)
    boundary = Boundary(part, plan.sizes.dim, precision.parameters, process.device)
    return Executor(schedule.actions, schedule.placement, rank, stages, channels, boundary, observer)


def _tied_embedding(
    stages: dict[int, Stage], config: Config, plan: Plan, process: RankProcess
) -> TiedEmbedding | None:
    rank = plan.layout.pipeline_rank(process.rank)
    if plan.tied_owners is None or rank not in plan.tied_owners:
        return None
    device = torch.device("cpu") if config.training.enable_cpu_offload else process.device
    first, last = plan.tied_owners
    members = plan.layout.pipeline_of(process.rank)
    owners = members[first], members[last]
    return TiedEmbedding(stages.get(0), stages.get(len(plan.stages) - 1), owners, device)


def config_precision(config: Config) -> Precision:
    """The data types that the configuration names."""
    training = config.training
    return Precision(_DTYPES[training.mixed_precision_param], _DTYPES[training.mixed_precision_reduce])
