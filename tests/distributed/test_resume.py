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
    ],
    ids=["one process", "pipeline 2"],
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


def close_to(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
    """The same steps, rates and tokens; loss and norm within what another order of sums makes."""
    for row, other in zip(found, expected, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    exact = ("step", "lr", "tokens")
    return all(row[key] == other[key] for row, other in zip(found, expected, strict=True) for key in exact)


@pytest.mark.slow
def test_a_run_that_loses_nodes_goes_on_with_fewer_ranks_and_the_same_text(tmp_path: Path) -> None:
    """The same command on 4, 2 and 1 data-parallel ranks: with global_batch_size, gradients are accumulated."""
    batch = "--training.global_batch_size 8 --training.batch_size 2 --checkpoint.interval 2"
    straight, shrinking = (tiny(tmp_path / name, batch, steps=7) for name in ("straight", "shrinking"))
    run(straight, 1)
    for ranks, step in ((4, 3), (2, 5)):
        assert -signal.SIGKILL in Forked.start(shrinking, ranks, dies_in_step(step, 0)).wait()
    run(shrinking, 1)
    assert close_to(rows(tmp_path / "shrinking"), rows(tmp_path / "straight"))


@pytest.mark.slow
def test_a_run_goes_on_in_one_layout_after_the_other(tmp_path: Path) -> None:
    """Pipeline 2 x shard 2, then one process, then two pipeline ranks, then two shards."""
    batch = "--training.global_batch_size 8 --checkpoint.interval 2"
    run(tiny(tmp_path / "straight", batch, "--training.batch_size 8", steps=9), 1)
    layouts = [(pipeline(2), 4, 4, 3), ("", 1, 8, 5), (pipeline(2), 2, 8, 7), ("", 2, 4, None)]
    for layout, ranks, batch_size, last in layouts:
        arguments = tiny(tmp_path / "changing", batch, layout, f"--training.batch_size {batch_size}", steps=9)
        before = None if last is None else dies_in_step(last, 0)
        codes = Forked.start(arguments, ranks, before).wait()
        assert (codes == [0, 0]) == (last is None)
    assert close_to(rows(tmp_path / "changing"), rows(tmp_path / "straight"))
