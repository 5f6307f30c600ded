"""What travels between stages: large messages, messages of both directions, and pairing with labels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from parallelisms.pipeline.channels import Channels
from parallelisms.pipeline.execute import Boundary, Executor
from parallelisms.pipeline.factory import build_schedule
from parallelisms.pipeline.schedules.catalogue import FAMILIES, find
from parallelisms.pipeline.setting import Costs, Setting
from parallelisms.pipeline.stage import LossFunction, Stage
from tests.distributed.pipeline_run import Record
from tests.distributed.ranks import run_ranks

ROWS, SEQ_LEN, DIM = 1, 1000, 5000  # five million elements, 20 MB: far more than any socket buffer holds
CPU = torch.device("cpu")


class CheckingStage(Stage):
    """Sends messages filled with a number that names stage and microbatch, and checks those that arrive."""

    def __init__(self, index: int, stages: int) -> None:
        super().__init__(index, nn.Identity(), last=index == stages - 1, split_backward=False)

    def _message(self, microbatch: int, sign: int) -> Tensor:
        return torch.full((ROWS, SEQ_LEN, DIM), float(sign * (100 * self.index + microbatch + 1)))

    def _check(self, tensor: Tensor, sender: int, microbatch: int, sign: int) -> None:
        expected = sign * (100 * sender + microbatch + 1)
        assert tensor[0, 0, 0] == expected, (self.index, microbatch, tensor[0, 0, 0], expected)
        assert tensor[-1, -1, -1] == expected

    def forward(
        self, microbatch: int, x: Tensor, loss: LossFunction | None, sequences: object = None
    ) -> Tensor:
        if not self.is_first:
            self._check(x, self.index - 1, microbatch, 1)
        return torch.zeros(()) if self.is_last else self._message(microbatch, 1)

    def backward(self, microbatch: int, output_gradient: Tensor | None) -> Tensor:
        if output_gradient is not None:
            self._check(output_gradient, self.index + 1, microbatch, -1)
        return self._message(microbatch, -1)

    backward_input = backward

    def backward_weight(self, microbatch: int) -> None: ...


def exchange_large_messages(rank: int, name: str, ranks: int, microbatches: int) -> int:
    placement = find(name).place(ranks)
    schedule = build_schedule(name, Setting(placement, microbatches, Costs.equal(placement.stages)))
    stages: dict[int, Stage] = {s: CheckingStage(s, placement.stages) for s in placement.stages_of(rank)}
    channels = Channels(schedule.actions, placement, range(ranks), rank, CPU)
    executor = Executor(
        schedule.actions,
        placement,
        rank,
        stages,
        channels,
        Boundary(SEQ_LEN, DIM, torch.float32, CPU),
        Record(),
    )
    executor.run([torch.zeros(ROWS, SEQ_LEN, dtype=torch.long)] * microbatches, None)
    return len(schedule.actions[rank])


@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_every_schedule_completes_with_five_million_element_activations(name: str) -> None:
    """Cases P4 (both ranks send before they receive) and P11 (output i paired with labels j)."""
    assert all(count > 0 for count in run_ranks(exchange_large_messages, 2, name, 2, 3))


@pytest.mark.slow
@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_four_ranks_complete_with_five_million_element_activations(name: str) -> None:
    assert all(count > 0 for count in run_ranks(exchange_large_messages, 4, name, 4, 3, timeout=120))
