"""The layouts among which the search chooses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from parallelisms.pipeline.errors import ScheduleError
from parallelisms.pipeline.schedules.catalogue import find
from parallelisms.pipeline.setting import Placement
from parallelisms.pipeline.split import StageSplit
from trainer.config.schema import Config
from trainer.plan.splits import Splits

# Schedules that hold all microbatches at once (GPipe, LoopedBFS) are never better than those here; Auto, which
# searches itself, may be tried afterwards.
_SCHEDULES = (
    ("1F1B", (1,)),
    ("ZB-H1", (1,)),
    ("ZB-H2", (1,)),
    ("Interleaved1F1B", (2, 4)),
    ("InterleavedZeroBubble", (2,)),
    ("ZBVZeroBubble", (2,)),
    ("DualPipeV", (2,)),
    ("V-Half", (2,)),
    ("V-Min", (2,)),
)
_CHECKPOINTING = ("none", "selective", "full")
_MOST_ROWS = 16
_FEWEST_TOKENS = 2048  # of a microbatch, where the batch allows: fewer do not fill a large accelerator


@dataclass(frozen=True)
class Candidate:
    """A way to lay a run out, but for how data-parallel ranks are split into replicas and shards.

    Attributes:
        pipeline: ranks of a pipeline.
        schedule: name; of a single rank there is only one.
        stages_per_rank: stages of each.
        rows: sequences of a microbatch.
        microbatches: of one step; their rows together are all sequences of a data-parallel rank.
        checkpointing: mode of activation checkpointing.
        by_parameters: stages are balanced by parameters instead of by work.
    """

    pipeline: int
    schedule: str
    stages_per_rank: int
    rows: int
    microbatches: int
    checkpointing: str
    by_parameters: bool = False

    @property
    def batch_size(self) -> int:
        """Sequences of a data-parallel rank in a step."""
        return self.rows * self.microbatches

    @property
    def placement(self) -> Placement:
        """Where the stages sit. Raises ScheduleError."""
        if self.pipeline == 1:
            return Placement.looped(1, 1)
        return find(self.schedule).place(self.pipeline, self.stages_per_rank)

    @property
    def splits_backward(self) -> bool:
        return self.pipeline > 1 and find(self.schedule).splits_backward

    def applied_to(
        self, config: Config, split: StageSplit, replicate: int, shard: int, most_microbatches: int
    ) -> Config:
        """The configuration of this layout, with the microbatches of one run cut down to `most_microbatches`.

        `split` are its stages; split points are given only where they are not what is made without.
        """
        microbatches = min(self.microbatches, most_microbatches)
        training = config.training.model_copy(
            update={
                "batch_size": self.rows * microbatches,
                "global_batch_size": None,
                "data_parallel_replicate_degree": replicate,
                "data_parallel_shard_degree": shard,
            }
        )
        experimental = config.experimental.model_copy(
            update={
                "pipeline_parallel_degree": self.pipeline,
                "pipeline_parallel_microbatches": microbatches,
                "pipeline_parallel_schedule": self.schedule,
                "pipeline_parallel_schedule_csv": None,
                "pipeline_parallel_split_points": self._points(split),
                "pipeline_parallel_layers_per_stage": None,
                "pipeline_parallel_stages_per_rank": self.stages_per_rank if self.pipeline > 1 else None,
                "pipeline_parallel_memory_limit": None,
            }
        )
        checkpoint = config.activation_checkpoint.model_copy(
            update={"mode": self.checkpointing, "selective_ac_option": "2"}
        )
        return config.model_copy(
            update={
                "training": training,
                "experimental": experimental,
                "activation_checkpoint": checkpoint,
                "validation": config.validation.model_copy(update={"enable": False}),
            }
        )

    def _points(self, split: StageSplit) -> tuple[str, ...]:
        return tuple(modules[0] for modules in split.stages[1:]) if self.by_parameters else ()

    def arguments(self, config: Config, split: StageSplit, replicate: int, shard: int) -> tuple[str, ...]:
        """What to write on the command line to get this layout."""
        chosen = self.applied_to(config, split, replicate, shard, self.microbatches)
        wanted = {
            "training": ("batch_size", "data_parallel_replicate_degree", "data_parallel_shard_degree"),
            "experimental": (
                "pipeline_parallel_degree",
                "pipeline_parallel_schedule",
                "pipeline_parallel_stages_per_rank",
                "pipeline_parallel_microbatches",
                "pipeline_parallel_split_points",
            ),
            "activation_checkpoint": ("mode",),
        }
        values = [
            (f"--{table}.{key}", getattr(getattr(chosen, table), key))
            for table, keys in wanted.items()
            for key in keys
        ]
        return tuple(
            part
            for key, value in values
            if value is not None and value != ()
            for part in (key, ",".join(value) if isinstance(value, tuple) else str(value))
        )


def candidates(
    world_size: int, n_layers: int, sequences: int, seq_len: int, splits: Splits
) -> Iterator[Candidate]:
    """Every layout of `world_size` ranks for steps of `sequences` sequences in all."""
    for pipeline in divisors(world_size):
        if pipeline > n_layers or sequences % (world_size // pipeline):
            continue
        batch_size = sequences // (world_size // pipeline)
        for schedule, each in _schedules(pipeline, n_layers):
            ways = (False, True) if splits.differ(pipeline * each) else (False,)
            for rows, mode, way in product(_rows(batch_size, seq_len), _CHECKPOINTING, ways):
                yield Candidate(pipeline, schedule, each, rows, batch_size // rows, mode, way)


def divisors(number: int) -> list[int]:
    """In rising order."""
    return [each for each in range(1, number + 1) if number % each == 0]


def _schedules(pipeline: int, n_layers: int) -> Iterator[tuple[str, int]]:
    if pipeline == 1:
        yield "1F1B", 1
        return
    for name, several in _SCHEDULES:
        for each in several:
            if pipeline * each <= n_layers and _exists(name, pipeline, each):
                yield name, each


def _exists(name: str, pipeline: int, each: int) -> bool:
    try:
        find(name).place(pipeline, each)
    except ScheduleError:
        return False
    return True


def _rows(batch_size: int, seq_len: int) -> list[int]:
    """Sequences of a microbatch: powers of two that divide the batch, those that are too short left out."""
    possible = [rows for rows in divisors(batch_size) if rows & (rows - 1) == 0 and rows <= _MOST_ROWS]
    long = [rows for rows in possible if rows * seq_len >= _FEWEST_TOKENS]
    return long or possible[-1:]
