"""What a configuration leaves open, filled in: degrees of -1, and the number of microbatches."""

from __future__ import annotations

from parallelisms.layout import Layout
from parallelisms.pipeline import csv
from trainer.config.schema import Config


def resolve_layout(config: Config, world_size: int) -> Layout:
    """The degrees of all dimensions; -1 is what the world size leaves. At least 1, also where nothing fits."""
    training = config.training
    pipeline = config.experimental.pipeline_parallel_degree
    replicate = training.data_parallel_replicate_degree
    shard = training.data_parallel_shard_degree
    context, tensor = config.experimental.context_parallel_degree, training.tensor_parallel_degree
    if shard == -1:
        shard = max(1, world_size // (pipeline * replicate * context * tensor))
    return Layout(pipeline, replicate, shard, context, tensor, config.experimental.expert_parallel_degree)


def microbatches_of(config: Config, stages: int) -> tuple[int, tuple[str, ...]]:
    """The number of microbatches, and a note if it is lower than the usual one."""
    experimental = config.experimental
    asked = experimental.pipeline_parallel_microbatches
    if asked is not None:
        return asked, ()
    if experimental.pipeline_parallel_schedule_csv is not None:
        return csv.microbatches_of(csv.read_csv(experimental.pipeline_parallel_schedule_csv)), ()
    batch_size = config.training.batch_size
    if stages <= batch_size:
        return stages, ()
    note = (
        f"{batch_size} microbatches instead of {stages}, one for each stage, "
        f"since training.batch_size is {batch_size}"
    )
    return batch_size, (note,)
