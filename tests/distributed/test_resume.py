"""Killed by signal 9 and started again, it is the same run: metrics bit for bit, apart from times.

Here on forked ranks; the launcher and real processes are in test_program.py.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.program import Forked, pipeline, rows, run, tiny
from trainer.checkpoint import manager
from trainer.loop import Loop, StepResult

STEPS = 12


def dies_in_step(step: int, rank: int) -> Callable[[int], None]:
    def before(own: int) -> None:
        train_step = Loop.train_step

        def killed(loop: Any) -> StepResult:
            result = train_step(loop)
            if result.step == step and own == rank:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        Loop.train_step = killed  # type: ignore[method-assign]

    return before


def dies_in_save(rank: int) -> Callable[[int], None]:
    """After the tensors are written, before the checkpoint is valid."""

    def before(own: int) -> None:
        write_tensors = manager.write_tensors

        def killed(*args: Any) -> None:
            write_tensors(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        if own == rank:
            manager.write_tensors = killed  # type: ignore[assignment]

    return before


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ("", 1),
        pytest.param(pipeline(2), 2, marks=pytest.mark.slow),
        pytest.param(pipeline(2), 4, marks=pytest.mark.slow),
    ],
    ids=["one process", "pipeline 2", "pipeline 2 x shard 2"],
)
def test_a_run_that_was_killed_again_and_again_logs_what_a_straight_one_does(
    tmp_path: Path, layout: str, ranks: int
) -> None:
    """Also case C2: learning rate and loss of every step after a resume."""
    straight, killed = (
        tiny(tmp_path / name, layout, "--checkpoint.interval 3", steps=STEPS)
        for name in ("straight", "killed")
    )
    run(straight, ranks)
    choose = random.Random(ranks)
    sabotages = [dies_in_step(4, choose.randrange(ranks)), dies_in_save(ranks - 1)]
    sabotages.append(dies_in_step(choose.randrange(7, STEPS), choose.randrange(ranks)))
    for sabotage in sabotages:
        assert -signal.SIGKILL in Forked.start(killed, ranks, sabotage).wait()
    run(killed, ranks)
    assert rows(tmp_path / "killed") == rows(tmp_path / "straight")
