"""What happens after a step beside the metrics: checkpoints, validation, timelines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from parallelisms.pipeline.timeline import TimelineRecorder
from trainer.build import Pipeline
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.state import TrainState
from trainer.config.schema import Profiling
from trainer.config.schema import Validation as ValidationTable
from trainer.data.build import ValidationData
from trainer.loop import StepResult
from trainer.plan.plan import Plan, ValidationPlan
from trainer.process import RankProcess
from trainer.progress import Progress
from trainer.replicas import check_replicas
from trainer.time_limit import TimeLimit
from trainer.timeline import write_timeline
from trainer.validation import validation_loss

if TYPE_CHECKING:
    from trainer.reporting import Reporter


class Checkpoints:
    """Saves when the configured interval has passed, after the last step, and when the job is asked to stop."""

    def __init__(
        self,
        manager: CheckpointManager,
        state: TrainState,
        steps: int,
        progress: Progress,
        limit: TimeLimit,
    ) -> None:
        """`limit` is told how long saves take."""
        self._manager = manager
        self._limit = limit
        self._state = state
        self._steps = steps
        self._progress = progress

    def before_step(self, step: int) -> None: ...

    def after_step(self, result: StepResult) -> None:
        self._progress.phase("saving a checkpoint", collective=True, patient=True)
        began = time.monotonic()
        last = result.step == self._steps
        self._manager.maybe_save(result.step, self._state, last=last, stop=result.stopping)
        self._limit.saved(self._manager.slowest_save, waited=time.monotonic() - began)

    def save_last(self, step: int) -> None:
        """Training has ended after `step`, sooner than configured."""
        self._progress.phase("saving a checkpoint", collective=True, patient=True)
        self._manager.maybe_save(step, self._state, last=True)


class Validation:
    """Measures the loss on held-out sets every so many steps, and after the last; not when the job is to stop soon."""

    def __init__(
        self,
        config: ValidationTable,
        plan: ValidationPlan,
        pipeline: Pipeline,
        sets: Sequence[ValidationData],
        process: RankProcess,
        reporter: Reporter,
        *,
        last_step: int,
    ) -> None:
        self._config = config
        self._last_step = last_step
        self._plan = plan
        self._pipeline = pipeline
        self._sets = sets
        self._process = process
        self._reporter = reporter

    def before_step(self, step: int) -> None: ...

    def after_step(self, result: StepResult) -> None:
        if result.step == self._last_step or (result.step % self._config.freq == 0 and not result.stopping):
            sums = {
                each.name: validation_loss(
                    self._pipeline,
                    self._plan,
                    each.loader,
                    batches=each.batches,
                    device=self._process.device,
                    progress=self._process.progress,
                )
                for each in self._sets
            }
            self._reporter.validated(result.step, sums)


class Replicas:
    """Compares what should be the same on several ranks, before it is saved."""

    def __init__(
        self, every: int, pipeline: Pipeline, optimizer: torch.optim.Optimizer, process: RankProcess
    ) -> None:
        self._every = every
        self._pipeline = pipeline
        self._optimizer = optimizer
        self._process = process

    def before_step(self, step: int) -> None: ...

    def after_step(self, result: StepResult) -> None:
        if self._every and result.step % self._every == 0:
            self._process.progress.phase("comparing replicas", collective=True)
            check_replicas(self._pipeline.parts, self._optimizer, self._pipeline.tied, self._process.device)


class Timelines:
    """Records the pipeline of the configured steps and writes their timelines."""

    def __init__(
        self, config: Profiling, recorder: TimelineRecorder, plan: Plan, folder: Path, progress: Progress
    ) -> None:
        self._progress = progress
        self._steps = frozenset(config.pipeline_timeline_steps)
        self._recorder = recorder
        self._plan = plan
        self._folder = folder

    def before_step(self, step: int) -> None:
        if step in self._steps:
            self._recorder.start()

    def after_step(self, result: StepResult) -> None:
        if result.step in self._steps:
            self._progress.phase("writing the timeline", collective=True, patient=True)
            measured = self._recorder.stop()
            write_timeline(self._folder, result.step, measured, self._plan.schedule, self._plan.layout)
