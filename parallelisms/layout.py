"""The layout: which dimensions the ranks span, in which order, who sits where, and what is applied to stages.

Plain data, decided from the configuration alone. Dimensions are ordered from the outermost, whose neighbours are
far apart and exchange little, to the innermost, whose neighbours sit in one node and exchange much.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PIPELINE = "pipeline"
REPLICATE = "replicate"
SHARD = "shard"
CONTEXT = "context"
TENSOR = "tensor"
# Over which parameters are sharded: data-parallel and context ranks together.
FSDP = "fsdp"
# Experts are spread over a part of those ranks, and what each holds is sharded over the others.
EXPERT_SHARD = "expert_shard"
EXPERT = "expert"

# How context ranks come to each other's keys and values: all at once, one after the other in a ring, or by
# exchanging heads for tokens.
RotateMethod = Literal["allgather", "alltoall", "ulysses"]


@dataclass(frozen=True)
class Layout:
    """Degrees of all dimensions; their product, without that of `expert`, is the world size.

    `expert` spans ranks of the dimensions shard and context, the innermost first, so it divides their product.
    """

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    @property
    def dimensions(self) -> tuple[tuple[str, int], ...]:
        """Names and degrees, outermost first."""
        return (
            (PIPELINE, self.pipeline),
            (REPLICATE, self.replicate),
            (SHARD, self.shard),
            (CONTEXT, self.context),
            (TENSOR, self.tensor),
        )

    @property
    def world_size(self) -> int:
        return self.pipeline * self.ranks_of_a_stage

    @property
    def ranks_of_a_stage(self) -> int:
        """How many ranks hold a part or a copy of one stage."""
        return self.replicate * self.shard * self.context * self.tensor

    @property
    def data_ranks(self) -> int:
        """How many ranks read different data."""
        return self.replicate * self.shard

    @property
    def sharding_ranks(self) -> int:
        """Over how many ranks FSDP shards a parameter: those of a context group hold the same parameters too."""
        return self.shard * self.context

    @property
    def ranks_of_a_token(self) -> int:
        """How many ranks have a token of the data among their own: a pipeline's, a tensor-parallel group's."""
        return self.pipeline * self.tensor

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a global rank sits in each dimension."""
        position = {}
        for name, degree in reversed(self.dimensions):
            rank, position[name] = divmod(rank, degree)
        return position

    def pipeline_rank(self, rank: int) -> int:
        return self.coordinates(rank)[PIPELINE]

    def data_rank(self, rank: int) -> int:
        """Which part of the data a global rank reads: equal for all ranks of one pipeline, context or tensor
        group."""
        position = self.coordinates(rank)
        return position[REPLICATE] * self.shard + position[SHARD]

    def pipeline_index(self, rank: int) -> int:
        """Which of the job's pipelines a global rank belongs to."""
        return rank % self.ranks_of_a_stage

    def pipeline_of(self, rank: int) -> tuple[int, ...]:
        """The global ranks of the pipeline that `rank` belongs to, first stage's rank first."""
        index = self.pipeline_index(rank)
        return tuple(p * self.ranks_of_a_stage + index for p in range(self.pipeline))


@dataclass(frozen=True)
class Float8:
    """Matrix products of the layers in 8-bit floating point.

    Attributes:
        recipe: "tensorwise", "rowwise" or "rowwise_with_gw_hp".
        filters: parts of the names of what is left out.
        gather: FSDP gathers the weights in float8, too.
        precompute: the scales of gathered weights are worked out at once after each update.
        emulate: round operands to float8 and multiply in high precision, on any device.
    """

    recipe: str = "tensorwise"
    filters: tuple[str, ...] = ()
    gather: bool = False
    precompute: bool = False
    emulate: bool = False


@dataclass(frozen=True)
class Parallelism:
    """What is applied to the module of every stage."""

    sharded: bool  # FSDP2 over the data-parallel ranks (over one, for its mixed precision)
    keep_gathered: bool  # parameters stay gathered from forward to backward
    release_always: bool = False  # after every forward and backward, also where others follow
    cpu_offload: bool = False
    overlap_tensor: bool = False  # compiled layers compute beside what tensor-parallel ranks exchange
    loss_parallel: bool = True  # tensor-parallel ranks compute the loss from their parts of the vocabulary
    checkpointing: str = "none"
    checkpointing_option: str = "2"
    rotate_method: RotateMethod = "allgather"
    balanced_context: bool = True  # whether sequences are cut so that context ranks have equal work
    checkpointing_budget: float = 0.5
    compile_backend: str | None = None  # of torch.compile for each layer; None: not compiled
    float8: Float8 | None = None
