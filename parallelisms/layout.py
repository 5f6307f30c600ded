"""The layout: which dimensions the ranks span, in which order, who sits where, and what is applied to stages.

Plain data, decided from the configuration alone. Dimensions are ordered from the outermost, whose neighbours are far apart and exchange little, to the
innermost, whose neighbours sit in one node and exchange much.
"""

from __future__ import annotations

from dataclasses import dataclass

PIPELINE = "pipeline"
REPLICATE = "replicate"
SHARD = "shard"


@dataclass(frozen=True)
class Layout:
    """Degrees of all dimensions; their product is the world size."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1

    @property
    def dimensions(self) -> tuple[tuple[str, int], ...]:
        """Names and degrees, outermost first."""
        return ((PIPELINE, self.pipeline), (REPLICATE, self.replicate), (SHARD, self.shard))

    @property
    def world_size(self) -> int:
        return self.pipeline * self.replicate * self.shard

    @property
    def data_ranks(self) -> int:
        """How many ranks read different data."""
        return self.replicate * self.shard

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a global rank sits in each dimension."""
        position = {}
        for name, degree in reversed(self.dimensions):
            rank, position[name] = divmod(rank, degree)
        return position

    def pipeline_rank(self, rank: int) -> int:
        return self.coordinates(rank)[PIPELINE]

    def data_rank(self, rank: int) -> int:
        """Which part of the data a global rank reads: equal for all ranks of one pipeline."""
        position = self.coordinates(rank)
        return position[REPLICATE] * self.shard + position[SHARD]

    def pipeline_of(self, rank: int) -> tuple[int, ...]:
        """The global ranks of the pipeline that `rank` belongs to, first stage's rank first."""
        return tuple(p * self.data_ranks + self.data_rank(rank) for p in range(self.pipeline))


@dataclass(frozen=True)
class Parallelism:
    """What is applied to the module of every stage."""

    sharded: bool  # FSDP2 over the data-parallel ranks (over one, for its mixed precision)
    keep_gathered: bool  # parameters stay gathered from forward to backward
    cpu_offload: bool = False
    checkpointing: str = "none"
    checkpointing_option: str = "2"
