"""Case L8: a loss or gradient that is not finite on one rank is refused by all, before the update is made."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.distributed.program import Forked, pipeline, rows, run, tiny
from trainer.errors import ExitCode
from trainer.loop import Loop, StepResult

Sabotage = Callable[[Any], None]  # called before a bad step with the loop, on the bad rank


def nan_loss(loop: Any) -> None:
    """The last stage of this rank returns NaN, once."""
    stage = max(loop._pipeline.stages.items())[1]
    forward = stage.forward

    def poisoned(*args: Any) -> Tensor:
        stage.forward = forward
        return forward(*args) * torch.nan

    stage.forward = poisoned


def infinite_gradient(loop: Any) -> None:
    """The loss is fine, but one weight of this rank gets an infinite gradient, once."""
    weight = next(p for p in loop._parameters() if p.dim() == 2)

    def poisoned(gradient: Tensor) -> Tensor:
        handle.remove()
        return gradient * torch.inf

    handle = weight.register_hook(poisoned)


def on_rank(bad_rank: int, bad_steps: tuple[int, ...], sabotage: Sabotage) -> Callable[[int], None]:
    """What makes `bad_steps` bad on one rank, and checks on every rank that each of them changes nothing."""

    def before(rank: int) -> None:
        train_step = Loop.train_step

        def checked(loop: Any) -> StepResult:
            if rank == bad_rank and loop.step + 1 in bad_steps:
                sabotage(loop)
            old = state_of(loop)
            result = train_step(loop)
            assert result.skipped == (result.step in bad_steps), result
            assert equal(old, state_of(loop)) == result.skipped, (rank, result)
            return result

        Loop.train_step = checked  # type: ignore[method-assign]

    return before


def state_of(loop: Any) -> list[Tensor]:
    """Copies of this rank's parameters and of what the optimizer keeps of them."""
    parameters = list(loop._parameters())
    kept = [value for p in parameters for _, value in sorted(loop._optimizer.state.get(p, {}).items())]
    local = [t.to_local() if isinstance(t, DTensor) else t for t in [*parameters, *kept]]
    return [t.detach().clone() for t in local]


def equal(old: list[Tensor], new: list[Tensor]) -> bool:
    """Bit for bit."""
    return len(old) == len(new) and all(map(torch.equal, old, new))


@pytest.mark.parametrize(
    ("layout", "ranks", "bad_rank", "sabotage"),
    [
        ("", 1, 0, nan_loss),
        (pipeline(2), 2, 1, nan_loss),
        (pipeline(2), 2, 0, infinite_gradient),
        (pipeline(2), 4, 3, nan_loss),
        ("--training.data_parallel_replicate_degree 2", 2, 1, nan_loss),
    ],
    ids=["one process", "last stage", "gradient on the first stage", "one shard", "one replica"],
)
def test_a_refused_step_leaves_parameters_and_optimizer_bit_for_bit(
    tmp_path: Path, layout: str, ranks: int, bad_rank: int, sabotage: Sabotage
) -> None:
    bad = (3, 5)
    said = run(tiny(tmp_path, layout, steps=6), ranks, on_rank(bad_rank, bad, sabotage))
    found = rows(tmp_path)
    assert [row["step"] for row in found if row["skipped"]] == list(bad)
    for row in found:
        assert (row["loss"] is None) == (row["skipped"] and sabotage is nan_loss)
        assert (row["grad_norm"] is None) == (row["skipped"] and sabotage is infinite_gradient)
    assert said.count("not finite; the step is skipped") == 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_policy_stop_ends_all_ranks_with_exit_code_5_and_one_line(tmp_path: Path, ranks: int) -> None:
    arguments = tiny(tmp_path, pipeline(ranks), "--training.nonfinite_policy stop")
    job = Forked.start(arguments, ranks, on_rank(ranks - 1, (3,), nan_loss))
    assert job.wait() == [ExitCode.TRAINING_FAILED] * ranks, job.said
    last = job.said.splitlines()[-1]
    assert last.startswith("step 3: loss nan"), job.said
    assert "training.nonfinite_policy = 'stop'" in last
    assert "Traceback" not in job.said
    assert json.loads((tmp_path / "failure.json").read_text())["exit_code"] == 5
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]


def test_more_refused_steps_in_a_row_than_tolerated_end_the_job(tmp_path: Path) -> None:
    bad = (2, 4, 5, 6)  # the first one is not in a row with the others
    arguments = tiny(tmp_path, pipeline(2), "--training.max_nonfinite_steps 2", steps=9)
    job = Forked.start(arguments, 2, on_rank(1, bad, nan_loss))
    assert job.wait() == [ExitCode.TRAINING_FAILED] * 2, job.said
    assert "3 times in a row; training.max_nonfinite_steps = 2" in job.said.splitlines()[-1]
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5]
