"""Measured step time of every schedule against its own prediction, beside torch's schedule classes.

    python benchmarks/sleeping_stages.py [--ranks 4] [--microbatches 8] [--milliseconds 80] [--steps 3]

The stages sleep instead of computing, so a machine with two cores shows the schedule and the executor and
nothing else. One rank's share of a microbatch takes the same time in the forward, for the input's gradient
and for the weights' gradient, however many stages the rank has. The ratio printed is measured / predicted,
best of the steps, for ours; for torch's classes it is measured / our prediction of the same schedule.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallelisms.pipeline.channels import Channels
from parallelisms.pipeline.execute import Boundary, Executor
from parallelisms.pipeline.factory import PipelineSchedule, build_schedule
from parallelisms.pipeline.schedules.catalogue import FAMILIES, find
from parallelisms.pipeline.setting import Costs, Setting
from parallelisms.pipeline.stage import LossFunction, Stage
from tests.distributed.pipeline_run import Record
from tests.distributed.ranks import RankError, run_ranks

_SHAPE = (1, 4, 8)  # rows, sequence length, dimension of what travels between stages
_TORCH = {
    "GPipe": "ScheduleGPipe",
    "1F1B": "Schedule1F1B",
    "Interleaved1F1B": "ScheduleInterleaved1F1B",
    "LoopedBFS": "ScheduleLoopedBFS",
    "InterleavedZeroBubble": "ScheduleInterleavedZeroBubble",
    "ZBVZeroBubble": "ScheduleZBVZeroBubble",
    "DualPipeV": "ScheduleDualPipeV",
}


@dataclass(frozen=True)
class Bench:
    name: str
    ranks: int
    microbatches: int
    seconds: float  # of each of forward, input gradient, weight gradient, of one rank's whole share
    steps: int

    def schedule(self) -> PipelineSchedule:
        placement = find(self.name).place(self.ranks)
        each = self.seconds / len(placement.stages_of(0))
        costs = Costs.equal(placement.stages, each, each, each)
        return build_schedule(self.name, Setting(placement, self.microbatches, costs))


class _SleepingStage(Stage):
    """A stage whose work is to sleep."""

    def __init__(self, index: int, last: bool, seconds: float) -> None:
        super().__init__(index, nn.Identity(), last=last, split_backward=False)
        self._seconds = seconds

    def forward(
        self, microbatch: int, x: Tensor, loss: LossFunction | None, sequences: object = None
    ) -> Tensor:
        time.sleep(self._seconds)
        return torch.zeros(()) if self.is_last else torch.zeros(_SHAPE)

    def backward(self, microbatch: int, output_gradient: Tensor | None) -> Tensor:
        time.sleep(2 * self._seconds)
        return torch.zeros(_SHAPE)

    def backward_input(self, microbatch: int, output_gradient: Tensor | None) -> Tensor:
        time.sleep(self._seconds)
        return torch.zeros(_SHAPE)

    def backward_weight(self, microbatch: int) -> None:
        time.sleep(self._seconds)


def run_ours(rank: int, bench: Bench) -> float:
    """Seconds of the best step, from the first rank's start to the last one's end."""
    schedule = bench.schedule()
    placement = schedule.placement
    own = placement.stages_of(rank)
    seconds = bench.seconds / len(own)
    stages: dict[int, Stage] = {s: _SleepingStage(s, s == placement.stages - 1, seconds) for s in own}
    device = torch.device("cpu")
    channels = Channels(schedule.actions, placement, range(bench.ranks), rank, device)
    boundary = Boundary(_SHAPE[1], _SHAPE[2], torch.float32, device)
    executor = Executor(schedule.actions, schedule.placement, rank, stages, channels, boundary, Record())
    inputs = [torch.zeros(_SHAPE[:2], dtype=torch.long)] * bench.microbatches
    return _best(bench.steps, lambda: executor.run(inputs, None))


class _SleepForInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0].contiguous(), None


class _SleepForWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0].sum_to_size(_SHAPE[-1]), None


class _SleepingModule(nn.Module):
    """The same work for torch's runtime, which asks autograd for the two gradients one after the other."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(_SHAPE[-1]))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return _SleepForInput.apply(x, self.seconds) + _SleepForWeight.apply(self.weight, self.seconds)


def run_torch(rank: int, bench: Bench) -> float:
    """As `run_ours`, with the class of torch.distributed.pipelining."""
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules

    placement = find(bench.name).place(bench.ranks)
    own = placement.stages_of(rank)
    seconds = bench.seconds / len(own)
    example = torch.zeros(_SHAPE, requires_grad=True)
    stages = [
        pipelining.PipelineStage(
            _SleepingModule(seconds),
            s,
            placement.stages,
            torch.device("cpu"),
            input_args=(example,),
            output_args=example,
        )
        for s in own
    ]
    kind = getattr(schedules, _TORCH[bench.name])
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    schedule = kind(
        stages[0] if single else stages, bench.microbatches, loss_fn=lambda output, target: output.sum()
    )
    batch = torch.zeros(bench.microbatches, *_SHAPE[1:])
    owns_first, owns_last = 0 in own, placement.stages - 1 in own

    def step() -> None:
        arguments = (batch.clone().requires_grad_(),) if owns_first else ()
        schedule.step(*arguments, **({"target": batch} if owns_last else {}))

    return _best(bench.steps, step)


def _best(steps: int, step: Any) -> float:
    step()  # connections are made in the first one
    best = float("inf")
    for _ in range(steps):
        dist.barrier()
        start = time.perf_counter()
        step()
        dist.barrier()
        best = min(best, time.perf_counter() - start)
    return best


def measure(function: Any, bench: Bench) -> str | float:
    """Seconds, or in a word why there are none."""
    try:
        return max(
            run_ranks(function, bench.ranks, bench, timeout=30 + 60 * bench.seconds * bench.microbatches)
        )
    except RankError as error:
        if "did not end within" in str(error):
            return "hangs"
        return "refuses" if "ValueError" in str(error) else "fails"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8])
    parser.add_argument("--milliseconds", type=float, default=80.0)
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    print(
        f"{'schedule':24}{'p':>3}{'m':>4}{'bound':>8}{'predicted':>11}{'ours':>8}{'ratio':>7}{'torch':>9}{'ratio':>7}"
    )
    for microbatches in arguments.microbatches:
        for family in FAMILIES:
            seconds = arguments.milliseconds / 1000
            bench = Bench(family.name, arguments.ranks, microbatches, seconds, arguments.steps)
            prediction = bench.schedule().prediction
            ours = measure(run_ours, bench)
            theirs = measure(run_torch, bench) if family.name in _TORCH else "-"
            ratios = [
                f"{x / prediction.step:7.3f}" if isinstance(x, float) else f"{'':7}" for x in (ours, theirs)
            ]
            shown = [f"{x:.3f}" if isinstance(x, float) else x for x in (ours, theirs)]
            print(
                f"{family.name:24}{arguments.ranks:3}{microbatches:4}{prediction.bound:8.3f}{prediction.step:11.3f}"
                f"{shown[0]:>8}{ratios[0]}{shown[1]:>9}{ratios[1]}",
                flush=True,
            )


if __name__ == "__main__":
    main()
