"""What all ranks do about a loss that spikes or is not finite: warn, skip, go back to a checkpoint."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.distributed.program import Forked, pipeline, rows, run, tiny, values
from tests.distributed.test_not_finite import equal, nan_loss, state_of
from trainer.errors import ExitCode
from trainer.loop import Loop, StepResult

SPIKES = "--training.loss_spike_threshold 1.5 --training.loss_spike_window 3 --checkpoint.interval 2"
ROLLBACK = "--training.loss_spike_policy rollback"


def spike(*steps: int, killed_in: int | None = None) -> Callable[[int], None]:
    """The loss of these steps is ten times what it is. Every rank checks what is promised of a rolled-back step."""

    def before(rank: int) -> None:
        train_step = Loop.train_step
        saved: dict[int, list[Tensor]] = {}

        def spiked(loop: Any) -> StepResult:
            accumulate = loop._accumulate_gradients
            if loop.step + 1 in steps:
                loop._accumulate_gradients = lambda batches: replace(
                    (sums := accumulate(batches)), loss=10 * sums.loss
                )
            old = state_of(loop)
            result = train_step(loop)
            loop._accumulate_gradients = accumulate
            if result.rolled_back_to is None:
                assert equal(old, state_of(loop)) == result.skipped
            elif result.rolled_back_to in saved:
                assert equal(saved[result.rolled_back_to], state_of(loop))
            saved[result.step] = state_of(loop)
            if result.step == killed_in:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        Loop.train_step = spiked  # type: ignore[method-assign]

    return before


@pytest.mark.parametrize(
    ("layout", "ranks"), [("", 1), (pipeline(2), 4)], ids=["one", "pipeline 2 x shard 2"]
)
def test_a_rollback_takes_the_state_of_the_checkpoint_and_goes_on_with_the_text_after(
    tmp_path: Path, layout: str, ranks: int
) -> None:
    said = run(tiny(tmp_path, layout, SPIKES, ROLLBACK, steps=8), ranks, spike(6))
    found = rows(tmp_path)
    assert [row["step"] for row in found] == list(range(1, 9))
    assert [(row["step"], row["rolled_back_to"]) for row in found if "rolled_back_to" in row] == [(6, 4)]
    assert [row["step"] for row in found if row["spike"]] == [6]
    assert [row["step"] for row in found if row["skipped"]] == [6]
    assert said.count("a spike; going back to the last checkpoint") == 1
    # Steps, rate and text go on as planned: as in a run without a spike.
    assert values(tmp_path, "tokens") == [
        128 * ranks // (2 if ranks > 1 else 1) * step for step in range(1, 9)
    ]


def test_a_run_that_is_killed_after_a_rollback_is_the_same_run(tmp_path: Path) -> None:
    straight, killed = (tiny(tmp_path / name, SPIKES, ROLLBACK, steps=9) for name in ("straight", "killed"))
    run(straight, 1, spike(5, 8))
    for step in (5, 7):
        assert Forked.start(killed, 1, spike(5, 8, killed_in=step)).wait() == [-signal.SIGKILL]
    run(killed, 1, spike(5, 8))
    assert rows(tmp_path / "killed") == rows(tmp_path / "straight")
    assert values(tmp_path / "straight", "rolled_back_to") == [4, 6]


def test_a_loss_that_is_no_number_goes_back_too_where_that_is_the_policy(tmp_path: Path) -> None:
    def before(rank: int) -> None:
        train_step = Loop.train_step

        def poisoned(loop: Any) -> StepResult:
            if loop.step == 4 and rank == 1:
                nan_loss(loop)
            return train_step(loop)

        Loop.train_step = poisoned  # type: ignore[method-assign]

    options = "--training.nonfinite_policy rollback --checkpoint.interval 3"
    run(tiny(tmp_path, pipeline(2), options, steps=6), 2, before)
    assert values(tmp_path, "rolled_back_to") == [3]
    assert [row["loss"] is None for row in rows(tmp_path)] == [False] * 4 + [True, False]


def test_a_rollback_without_a_checkpoint_ends_with_exit_code_5(tmp_path: Path) -> None:
    options = "--training.nonfinite_policy rollback --checkpoint.interval 3"
    job = Forked.start(tiny(tmp_path, options), 1, _poison_the_second)
    assert job.wait() == [ExitCode.TRAINING_FAILED], job.said
    assert job.said.splitlines()[-1] == "there is no checkpoint yet to go back to"


def _poison_the_second(rank: int) -> None:
    train_step = Loop.train_step

    def poisoned(loop: Any) -> StepResult:
        if loop.step == 1:
            nan_loss(loop)
        return train_step(loop)

    Loop.train_step = poisoned  # type: ignore[method-assign]


@pytest.mark.parametrize("policy", ["skip", "warn"])
def test_a_spike_is_skipped_or_only_said(tmp_path: Path, policy: str) -> None:
    said = run(tiny(tmp_path, SPIKES, f"--training.loss_spike_policy {policy}", steps=6), 1, spike(5))
    assert [row["step"] for row in rows(tmp_path) if row["spike"]] == [5]
    assert [row["step"] for row in rows(tmp_path) if row["skipped"]] == ([5] if policy == "skip" else [])
    assert said.count("times the median of the losses before it: a spike") == 1


def test_a_spike_ends_all_ranks_with_exit_code_5_where_that_is_the_policy(tmp_path: Path) -> None:
    job = Forked.start(
        tiny(tmp_path, pipeline(2), SPIKES, "--training.loss_spike_policy stop", steps=6), 2, spike(5)
    )
    assert job.wait() == [ExitCode.TRAINING_FAILED] * 2
    assert "training.loss_spike_policy = 'stop'" in job.said.splitlines()[-1]
