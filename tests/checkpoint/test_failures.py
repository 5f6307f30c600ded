"""A save that fails on any rank leaves no half checkpoint, and the run goes on; so does a killed one, later."""

from __future__ import annotations

import logging
import resource
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoint.tiny import Layout, Run, manager
from tests.distributed.ranks import RankError, run_ranks

TWO = Layout(shard=2)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def fill_the_disk(full: bool) -> None:
    """No file of this process can grow beyond some bytes: what a full disk looks like to a writer."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = 512 if full else resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def save_with_a_full_disk(rank: int, folder: Path, full_rank: int) -> dict[str, Any]:
    errors: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            errors.append(record.getMessage())

    logging.getLogger("trainer").addHandler(Collect(logging.ERROR))
    run, checkpoints = Run(TWO, rank), manager(folder, TWO, keep_latest_k=1)
    run.train()
    assert checkpoints.maybe_save(2, run.state) is not None
    before = names(folder)
    run.train()
    fill_the_disk(rank == full_rank)
    assert checkpoints.maybe_save(4, run.state) is None
    fill_the_disk(False)
    between = names(folder)
    run.train()
    assert checkpoints.maybe_save(6, run.state) is not None
    torch.distributed.barrier()
    return {"before": before, "between": between, "after": names(folder), "errors": errors}


@pytest.mark.parametrize("full_rank", [0, 1])
def test_no_space_on_one_rank_keeps_the_last_valid_checkpoint_and_the_run(
    tmp_path: Path, full_rank: int
) -> None:
    """Case C1: retention counts saves that failed."""
    first, second = run_ranks(save_with_a_full_disk, 2, tmp_path, full_rank)
    assert first["before"] == first["between"] == {"step-2"}
    assert first["after"] == second["after"] == {"step-6"}
    (message,) = first["errors"]
    assert "CHECKPOINT NOT SAVED at step 4" in message
    assert f"rank {full_rank}: " in message
    assert "Training goes on" in message


def save_into_a_file(rank: int, folder: Path) -> Any:
    run = Run(TWO, rank)
    run.train()
    return manager(folder / "a-file" / "checkpoint", TWO).save(1, run.state)


def test_a_folder_that_cannot_be_made_is_a_failed_save_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "a-file").write_text("")
    assert run_ranks(save_into_a_file, 2, tmp_path) == [None, None]


def save_with_different_positions(rank: int, folder: Path) -> Any:
    run = Run(TWO, rank)
    run.train()
    run.state.data.document += rank
    return manager(folder, TWO).save(1, run.state)


def test_ranks_at_different_positions_in_the_data_save_nothing(tmp_path: Path) -> None:
    assert run_ranks(save_with_different_positions, 2, tmp_path) == [None, None]
    assert names(tmp_path) == set()


def save_by_seconds(rank: int, folder: Path) -> list[int]:
    run, checkpoints = Run(TWO, rank), manager(folder, TWO, interval=5, interval_type="seconds")
    checkpoints._last_save_time -= 100 if rank == 0 else -100  # clocks that disagree
    saved = []
    for _ in range(3):
        run.train()
        if checkpoints.maybe_save(run.step, run.state):
            saved.append(run.step)
    return saved


def test_ranks_whose_clocks_differ_save_together(tmp_path: Path) -> None:
    assert run_ranks(save_by_seconds, 2, tmp_path) == [[1], [1]]


def die_while_saving(rank: int, folder: Path, after_seconds: float) -> None:
    run, checkpoints = Run(TWO, rank), manager(folder, TWO, keep_latest_k=2)
    run.train()
    checkpoints.save(run.step, run.state)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process at once, wherever it is
    signal.setitimer(signal.ITIMER_REAL, after_seconds * (1 + rank / 7))
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        run.train()
        checkpoints.save(run.step, run.state)


def load_and_check(rank: int, folder: Path) -> tuple[int | None, Any, Any]:
    run, straight = Run(TWO, rank), Run(TWO, rank)
    step = manager(folder, TWO).load(run.state)
    straight.train(step or 0)
    return step, run.snapshot(), straight.snapshot()


@pytest.mark.parametrize("after", [0.005, 0.02, 0.05, 0.11])
def test_a_run_killed_at_any_moment_goes_on_from_a_whole_checkpoint(tmp_path: Path, after: float) -> None:
    with pytest.raises(RankError, match=r"died|raised"):
        run_ranks(die_while_saving, 2, tmp_path, after)
    for step, loaded, straight in run_ranks(load_and_check, 2, tmp_path):
        assert step is not None
        np.testing.assert_equal(loaded, straight)
    assert not [name for name in names(tmp_path) if "." in name]
