"""Which rank computes longest: the time of each rank's own work in the steps that are logged.

Time in which a rank waits for others is not its own, so it shows nothing that step times show: those are equal on
all ranks. What a rank computes is on the device's own clock, by the recorder of timelines.
"""

from __future__ import annotations

import statistics

import torch
import torch.distributed as dist

from parallelisms.pipeline.measured import RankTimeline
from parallelisms.pipeline.timeline import TimelineRecorder
from trainer.config.schema import Config
from trainer.loop import StepResult
from trainer.process import RankProcess


class Stragglers:
    """A listener, ahead of the one that logs. `figures`: of the last logged step; empty if there are none."""

    def __init__(self, config: Config, recorder: TimelineRecorder, process: RankProcess) -> None:
        self._config = config
        self._recorder = recorder
        self._process = process
        self.figures: dict[str, float] = {}

    def before_step(self, step: int) -> None:
        if self._watches(step):
            self._recorder.start()

    def after_step(self, result: StepResult) -> None:
        """One reduction, of a number from each rank."""
        self.figures = {}
        if not self._watches(result.step):
            return
        self._process.progress.phase("comparing ranks", collective=True)
        everyone = torch.zeros(self._process.world_size, dtype=torch.float64, device=self._process.device)
        everyone[self._process.rank] = compute_seconds(self._recorder.stop())
        dist.all_reduce(everyone)
        self.figures = straggler_figures(everyone.tolist())

    def _watches(self, step: int) -> bool:
        """Logged steps, unless their timeline is recorded anyway."""
        logged = step == 1 or step % self._config.metrics.log_freq == 0
        recorded = step in self._config.profiling.pipeline_timeline_steps
        return self._process.world_size > 1 and logged and not recorded


def compute_seconds(timeline: RankTimeline) -> float:
    """What the rank spent on forward and backward computation."""
    return sum(each.seconds for each in timeline.actions if each.action.kind.is_compute)


def straggler_figures(seconds: list[float]) -> dict[str, float]:
    """Of the computation of each rank: its median, its longest, and whose that is."""
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    return {
        "compute_seconds_median": statistics.median(seconds),
        "compute_seconds_max": seconds[slowest],
        "slowest_rank": slowest,
    }
