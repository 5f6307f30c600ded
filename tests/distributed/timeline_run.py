"""Steps of stages that sleep, measured on forked ranks, and their timelines in a folder."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallelisms.layout import Layout
from parallelisms.pipeline.channels import Channels
from parallelisms.pipeline.execute import Boundary, Executor
from parallelisms.pipeline.factory import PipelineSchedule, build_schedule
from parallelisms.pipeline.measured import Timeline
from parallelisms.pipeline.schedules.catalogue import find
from parallelisms.pipeline.setting import Costs, Setting
from parallelisms.pipeline.stage import LossFunction, Stage
from parallelisms.pipeline.timeline import TimelineRecorder
from parallelisms.pipeline.timeline_file import read_timeline
from tests.distributed.ranks import run_ranks
from trainer.progress import Progress
from trainer.timeline import write_timeline

_SHAPE = (1, 4, 8)  # rows, sequence length, dimension of what travels between stages
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Sleep:
    """What is measured. Each part of a rank's share of a microbatch takes `seconds`.

    `slow` adds seconds to the forward of stages, `clocks` to the clocks of ranks.
    """

    schedule: str
    folder: Path
    pipeline: int = 4
    microbatches: int = 8
    replicas: int = 1
    seconds: float = 0.01
    accumulation: int = 1
    steps: int = 1
    slow: Mapping[int, float] = field(default_factory=dict)
    clocks: Mapping[int, float] = field(default_factory=dict)

    def plan(self) -> PipelineSchedule:
        """All stages as fast as each other: nobody has told the plan of the slow ones."""
        placement = find(self.schedule).place(self.pipeline)
        each = self.seconds * self.pipeline / placement.stages
        costs = Costs.equal(placement.stages, each, each, each)
        return build_schedule(self.schedule, Setting(placement, self.microbatches, costs))

    @property
    def layout(self) -> Layout:
        return Layout(pipeline=self.pipeline, replicate=self.replicas)


class SleepingStage(Stage):
    """A stage whose work is to sleep."""

    def __init__(self, index: int, last: bool, seconds: float, slow: float) -> None:
        super().__init__(index, nn.Identity(), last=last, split_backward=False)
        self._seconds, self._slow = seconds, slow

    def forward(
        self, microbatch: int, x: Tensor, loss: LossFunction | None, sequences: object = None
    ) -> Tensor:
        time.sleep(self._seconds + self._slow)
        return torch.zeros(()) if self.is_last else torch.zeros(_SHAPE)

    def backward(self, microbatch: int, output_gradient: Tensor | None) -> Tensor:
        time.sleep(2 * self._seconds)
        return torch.zeros(_SHAPE)

    def backward_input(self, microbatch: int, output_gradient: Tensor | None) -> Tensor:
        time.sleep(self._seconds)
        return torch.zeros(_SHAPE)

    def backward_weight(self, microbatch: int) -> None:
        time.sleep(self._seconds)


def measure(sleep: Sleep) -> list[Timeline]:
    """Run it on forked ranks; the timelines of its steps, from their files."""
    run_ranks(_run, sleep.layout.world_size, sleep, timeout=90)
    return [read_timeline(sleep.folder / "timeline" / f"step-{k + 1}.json") for k in range(sleep.steps)]


def _run(rank: int, sleep: Sleep) -> None:
    if rank in sleep.clocks:
        _set_clock_forward(sleep.clocks[rank])
    schedule, layout = sleep.plan(), sleep.layout
    placement, pipeline_rank = schedule.placement, layout.pipeline_rank(rank)
    own = placement.stages_of(pipeline_rank)
    seconds = sleep.seconds / len(own)
    stages: dict[int, Stage] = {
        s: SleepingStage(s, s == placement.stages - 1, seconds, sleep.slow.get(s, 0.0)) for s in own
    }
    channels = Channels(schedule.actions, placement, layout.pipeline_of(rank), pipeline_rank, _CPU)
    recorder = TimelineRecorder(Progress(), _CPU)
    boundary = Boundary(_SHAPE[1], _SHAPE[2], torch.float32, _CPU)
    executor = Executor(schedule.actions, placement, pipeline_rank, stages, channels, boundary, recorder)
    inputs = [torch.zeros(_SHAPE[:2], dtype=torch.long)] * sleep.microbatches
    for step in range(1, sleep.steps + 1):
        dist.barrier()
        recorder.start()
        for _ in range(sleep.accumulation):
            executor.run(inputs, None)
        write_timeline(sleep.folder, step, recorder.stop(), schedule, layout)


def _set_clock_forward(seconds: float) -> None:
    """As if this rank were on a host that was started earlier."""
    true_clock, ahead = time.monotonic_ns, round(seconds * 1e9)
    time.monotonic_ns = lambda: true_clock() + ahead
