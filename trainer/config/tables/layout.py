"""Tables about how the model is laid out over ranks and what that saves or costs."""

from typing import Literal

from pydantic import Field

from trainer.config.tables.base import EveryNthOrOperations, Names, Positive, Table, Text


class Experimental(Table):
    """Pipeline, context and expert parallelism."""

    pipeline_parallel_degree: Positive = 1
    """Ranks of a pipeline (not stages: a rank can own several). 1: no pipeline."""

    pipeline_parallel_microbatches: Positive | None = None
    """Parts into which batch_size is cut; it need not divide it.
    Unset: the number of stages of the whole pipeline, lowered to batch_size if that is smaller."""

    pipeline_parallel_schedule: Text = "1F1B"
    """Name of the schedule, in upper or lower case. `stageline plan` shows what it costs."""

    pipeline_parallel_schedule_csv: Text | None = None
    """A file with the actions of every rank, in torch's format, instead of a named schedule."""

    pipeline_parallel_split_points: Names = ()
    """Layers that each begin a stage, such as "layers.4,layers.8". Unset: balanced by cost."""

    pipeline_parallel_layers_per_stage: Positive | None = None
    """Layers of a stage; decides the number of stages."""

    pipeline_parallel_stages_per_rank: Positive | None = None
    """Stages of a rank. Unset: 1 for single-stage schedules, 2 for the others."""

    pipeline_parallel_memory_limit: float | None = Field(default=None, gt=0)
    """Most activations a rank may hold, in microbatches of its whole share, for schedules that can trade
    time for memory."""

    context_parallel_degree: Positive = 1
    """Ranks over which every sequence is divided."""

    context_parallel_rotate_method: Literal["allgather", "alltoall", "ulysses"] = "allgather"
    """How context ranks come to each other's keys and values. "allgather": all at once, a layer at a time.
    "alltoall": one rank's after the other's in a ring, so that no rank holds all of them. "ulysses": each rank gets
    the whole sequence of a part of the heads."""

    context_parallel_load_balancer: Literal["headtail", "none"] = "headtail"
    """"headtail": each context rank gets a part from the head of every sequence and one from its tail, which together
    cost the same on all. "none": one contiguous part; later ranks have more to do, since causal attention looks
    back."""

    enable_async_tensor_parallel: bool = False
    """Overlap what tensor-parallel ranks exchange with the matrix products beside it. On CUDA devices, with
    training.compile and its backend "inductor"."""

    expert_parallel_degree: Positive = 1
    """Ranks over which the experts of every layer are spread; they are among the data-parallel and context ranks,
    so this divides data_parallel_shard_degree × context_parallel_degree."""


class ActivationCheckpoint(Table):
    """Recomputing activations in the backward instead of keeping them."""

    mode: Literal["none", "full", "selective", "memory_budget"] = "none"
    """"full": of every layer. "selective": of what selective_ac_option names. "memory_budget": of what the compiler
    chooses to stay within memory_budget; needs training.compile."""

    selective_ac_option: EveryNthOrOperations = "2"
    """With mode "selective": every how many layers one is recomputed; or "op": of every layer, all but attention
    and every second matrix product."""

    memory_budget: float = Field(default=0.5, ge=0, le=1)
    """With mode "memory_budget": which share of the activations of a compiled layer is kept. 0 keeps its input, 1
    whatever makes the backward fastest."""


class Float8(Table):
    """Matrix products in 8-bit floating point, by torchao."""

    enable_float8_linear: bool = False
    """Compute the linear layers of all layers in float8; embedding, output and experts stay as they are."""

    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """How operands are scaled: with one number each, or one for each row. "rowwise_with_gw_hp" computes weight
    gradients in high precision: most accurate, least fast."""

    enable_fsdp_float8_all_gather: bool = False
    """Gather sharded weights in float8, which is half of the bytes of bfloat16. Only with "tensorwise"."""

    precompute_float8_dynamic_scale_for_fsdp: bool = False
    """Work out the scales of all gathered weights at once after each update."""

    filter_fqns: Names = ()
    """Parts of the names of linear layers that stay as they are, such as "attention.wk,attention.wv".
    "auto_filter_small_kn": those that are too small to be faster. Those with a size that is no multiple of 16
    always stay."""

    emulate: bool = False
    """Round to float8 but multiply in high precision, on any device: to try it out, not to be fast."""
