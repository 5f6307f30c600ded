"""The training loop: the algorithm of a run, free of how it is laid out over ranks."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallelisms.float8 import precompute_scales
from parallelisms.tensor import sum_gradients_of_whole_parameters
from trainer.build import Pipeline
from trainer.config.schema import Config
from trainer.data.loader import Batch
from trainer.errors import TrainingFailed
from trainer.expert_balance import ExpertBalance, ExpertCounts
from trainer.gradients import all_finite, clip, local_norm_squared
from trainer.loss import counted_tokens, loss_of_microbatches
from trainer.lr_schedule import Schedule
from trainer.microbatches import Microbatches, cut_into_microbatches
from trainer.plan.plan import Plan
from trainer.progress import Progress
from trainer.stop import StopRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did; equal on all ranks."""

    step: int
    loss: float  # mean over the counted tokens of the global batch
    grad_norm: float  # of the whole model, before clipping
    lr: float
    tokens: int  # seen since the start of training
    seconds: float
    data_seconds: float
    skipped: bool  # the loss or the norm was not finite, and the parameters are those from before
    stopping: bool  # a rank was asked to stop: this step is the last one
    expert_counts: ExpertCounts | None = None  # of models with experts, unless the step was skipped


@dataclass(frozen=True)
class _Sums:
    """What one reduction over all ranks tells each of them."""

    loss: float
    grad_norm: float
    stopping: bool


class Listener(Protocol):
    """What happens beside the steps: metrics, checkpoints, validation, profiling."""

    def before_step(self, step: int) -> None: ...

    def after_step(self, result: StepResult) -> None: ...


class Loop:
    """Runs optimizer steps from `step + 1` to the last."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        pipeline: Pipeline,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        batches: Iterator[Batch],
        device: torch.device,
        progress: Progress,
        stop: StopRequest | None = None,
    ) -> None:
        self.step = 0
        self.counters: dict[str, int | float] = {"tokens": 0, "skipped_in_a_row": 0}
        self._training = config.training
        self._plan = plan
        self._pipeline = pipeline
        self._optimizer = optimizer
        self._schedule = schedule
        self._batches = batches
        self._device = device
        self._progress = progress
        self._stop = stop or StopRequest()
        self._balance = ExpertBalance(config, plan, pipeline.parts, device)
        float8 = plan.parallelism.float8
        if float8 is not None and float8.precompute:
            optimizer.register_step_post_hook(lambda *_: precompute_scales(pipeline.parts))

    def run(self, listeners: Sequence[Listener]) -> bool:
        """Train until the configured number of steps; False if it ended before, since a rank was asked to stop.

        Garbage is collected between steps only, on all ranks at once: a collection in the middle of a step on
        one rank stops the others.
        """
        gc.disable()
        while self.step < self._training.steps:
            for listener in listeners:
                listener.before_step(self.step + 1)
            result = self.train_step()
            for listener in listeners:
                listener.after_step(result)
            if result.stopping and self.step < self._training.steps:
                return False
            if self.step % self._training.gc_freq == 0:
                gc.collect(1)
        return True

    def train_step(self) -> StepResult:
        """One optimizer step over the next global batch."""
        start = time.perf_counter()
        self._progress.phase("reading data", step=self.step + 1)
        batches = [self._next_microbatches() for _ in range(self._plan.accumulation)]
        data_seconds = time.perf_counter() - start
        sums = self._accumulate_gradients(batches)
        loss, grad_norm = sums.loss, sums.grad_norm
        self.step += 1
        lr = self._schedule.lr
        skipped = not all_finite((loss, grad_norm))
        self._progress.phase("optimizer")
        expert_counts = None
        if skipped:
            self._skip(loss, grad_norm)
        else:
            self.counters["skipped_in_a_row"] = 0
            clip(self._parameters(), grad_norm, self._training.max_norm)
            self._optimizer.step()
            expert_counts = self._balance_experts()
        self._schedule.step()
        self.counters["tokens"] += self._plan.tokens_per_step
        self._optimizer.zero_grad(set_to_none=True)
        return StepResult(
            step=self.step,
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            tokens=int(self.counters["tokens"]),
            seconds=time.perf_counter() - start,
            data_seconds=data_seconds,
            skipped=skipped,
            stopping=sums.stopping,
            expert_counts=expert_counts,
        )

    def _next_microbatches(self) -> Microbatches:
        batch = next(self._batches).to(self._device)
        return cut_into_microbatches(batch, self._plan.rows, self._pipeline.sequence_cut)

    def _accumulate_gradients(self, batches: list[Microbatches]) -> _Sums:
        """Run the schedule over every batch."""
        counted = self._count_tokens(batches)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for position, batch in enumerate(batches):
            losses = self._pipeline.executor.run(
                batch.tokens,
                loss_of_microbatches(batch.labels, counted, self._pipeline.vocabulary),
                sequences=batch.sequences,
                last_accumulation=position == len(batches) - 1,
            )
            total += sum(losses)
        self._sum_gradients_of_whole_parameters()
        self._sum_tied_gradients()
        self._progress.phase("reducing loss and gradient norm", collective=True)
        norm_squared = local_norm_squared(self._pipeline.distinct_parameters(), self._device)
        # Every rank of a tensor group computes the loss of the same tokens.
        total /= self._plan.layout.tensor
        sums = torch.stack([total, norm_squared, torch.full_like(total, self._stop.asked)])
        dist.all_reduce(sums)
        loss, norm_squared_sum, asked_to_stop = sums.tolist()
        return _Sums(loss, norm_squared_sum**0.5, asked_to_stop > 0)

    def _sum_gradients_of_whole_parameters(self) -> None:
        if self._plan.layout.tensor > 1:
            self._progress.phase("summing gradients over tensor-parallel ranks", collective=True)
            parameters = [p for part in self._pipeline.parts for p in part.parameters()]
            sum_gradients_of_whole_parameters(parameters, self._pipeline.meshes.tensor)

    def _sum_tied_gradients(self) -> None:
        tied = self._pipeline.tied
        if tied is not None:
            self._progress.phase("summing the gradients of tied embeddings", peer=tied.peer)
            tied.sum_gradients()

    def _count_tokens(self, batches: list[Microbatches]) -> Tensor:
        """The counted tokens of the global batch, before the first backward needs them."""
        self._progress.phase("counting tokens", collective=True)
        counted = torch.stack([counted_tokens(labels) for batch in batches for labels in batch.labels]).sum()
        # Several ranks have the same tokens: the sum over the world counts each once for every one of them.
        dist.all_reduce(counted)
        return counted // self._plan.layout.ranks_of_a_token

    def _balance_experts(self) -> ExpertCounts | None:
        if not self._balance.has_experts:
            return None
        self._progress.phase("balancing experts", collective=True)
        return self._balance.update()

    def _skip(self, loss: float, grad_norm: float) -> None:
        """All ranks come here together, since they share both values."""
        self._balance.discard()
        self.counters["skipped_in_a_row"] += 1
        in_a_row = self.counters["skipped_in_a_row"]
        training = self._training
        what = f"step {self.step}: loss {loss}, gradient norm {grad_norm}: not finite"
        if training.nonfinite_policy == "stop":
            raise TrainingFailed(
                f"{what}; training.nonfinite_policy = 'stop'; the parameters are those before the step"
            )
        if in_a_row > training.max_nonfinite_steps:
            raise TrainingFailed(
                f"{what}, {in_a_row} times in a row; "
                f"training.max_nonfinite_steps = {training.max_nonfinite_steps}"
            )
        logger.warning("%s; the step is skipped", what)

    def _parameters(self) -> Iterator[nn.Parameter]:
        for part in self._pipeline.parts:
            yield from part.parameters()
