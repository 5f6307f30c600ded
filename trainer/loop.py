"""The training loop: the algorithm of a run, free of how it is laid out over ranks."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallelisms.float8 import precompute_scales
from parallelisms.tensor import sum_gradients_of_whole_parameters
from trainer.anomalies import Anomalies, Policy
from trainer.build import Pipeline
from trainer.config.schema import Config
from trainer.data.loader import Batch
from trainer.expert_balance import ExpertBalance, ExpertCounts
from trainer.gradients import clip, local_norm_squared
from trainer.loss import counted_tokens, loss_of_microbatches
from trainer.lr_schedule import Schedule
from trainer.microbatches import Microbatches, cut_into_microbatches
from trainer.plan.plan import Plan
from trainer.progress import Progress
from trainer.stop import StopRequest
from trainer.time_limit import TimeLimit


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
    skipped: bool  # its update was not made: something was not finite, or the loss is a spike
    stopping: bool  # a rank was asked to stop, or time is nearly up: this step is the last one
    spike: bool = False  # the loss is far above those before it
    rolled_back_to: int | None = None  # the step whose parameters and optimizer are those after this one
    expert_counts: ExpertCounts | None = None  # of models with experts, unless the step was skipped


@dataclass(frozen=True)
class _Sums:
    """What one reduction over all ranks tells each of them."""

    loss: float
    grad_norm: float
    signalled: bool
    out_of_time: bool


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
        limit: TimeLimit | None = None,
    ) -> None:
        """`roll_back`, for policies that do, sets parameters and optimizer to those of the last checkpoint on all
        ranks, and returns its step."""
        self.step = 0
        self.counters: dict[str, Any] = {"tokens": 0, "skipped_in_a_row": 0}
        self.roll_back: Callable[[], int] | None = None
        self.out_of_time = False
        self._anomalies = Anomalies(config.training, self.counters)
        self._training = config.training
        self._plan = plan
        self._pipeline = pipeline
        self._optimizer = optimizer
        self._schedule = schedule
        self._batches = batches
        self._device = device
        self._progress = progress
        self._stop = stop or StopRequest()
        self._limit = limit or TimeLimit(None, 0.0)
        self._balance = ExpertBalance(config, plan, pipeline.parts, device)
        float8 = plan.parallelism.float8
        self._precomputes_scales = float8 is not None and float8.precompute

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
        self._progress.phase("optimizer")
        verdict = self._anomalies.judge(self.step, loss, grad_norm)
        expert_counts = None
        if verdict.policy is Policy.UPDATE:
            clip(self._parameters(), grad_norm, self._training.max_norm)
            self._optimizer.step()
            expert_counts = self._balance_experts()
        else:
            self._balance.discard()
        self._schedule.step()
        self.counters["tokens"] += self._plan.tokens_per_step
        self._optimizer.zero_grad(set_to_none=True)
        rolled_back_to = self._go_back() if verdict.policy is Policy.ROLL_BACK else None
        if self._precomputes_scales and (verdict.policy is not Policy.SKIP):
            precompute_scales(self._pipeline.parts)
        self.out_of_time = sums.out_of_time
        return StepResult(
            step=self.step,
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            tokens=int(self.counters["tokens"]),
            seconds=time.perf_counter() - start,
            data_seconds=data_seconds,
            skipped=verdict.policy is not Policy.UPDATE,
            stopping=sums.signalled or sums.out_of_time,
            spike=verdict.spike,
            rolled_back_to=rolled_back_to,
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
        wishes = [torch.full_like(total, wish) for wish in (self._stop.asked, self._limit.reached())]
        sums = torch.stack([total, norm_squared, *wishes])
        dist.all_reduce(sums)
        loss, norm_squared_sum, signalled, out_of_time = sums.tolist()
        return _Sums(loss, norm_squared_sum**0.5, signalled > 0, out_of_time > 0)

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

    def _go_back(self) -> int:
        """All ranks come here together, since they judge by the same numbers."""
        assert self.roll_back is not None
        self._progress.phase("going back to a checkpoint", collective=True, patient=True)
        return self.roll_back()

    def _parameters(self) -> Iterator[nn.Parameter]:
        for part in self._pipeline.parts:
            yield from part.parameters()
