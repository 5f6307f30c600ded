"""A save in the background has what the parameters were at the call, and fails, ends and is counted like any other."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoint.test_failures import fill_the_disk
from tests.checkpoint.tiny import Layout, Run, manager
from tests.distributed.ranks import run_ranks
from trainer.checkpoint import manager as module
from trainer.checkpoint.folders import list_checkpoints
from trainer.checkpoint.local import LocalRoot

MODES = ("async", "async_with_pinned_mem")
TWO = Layout(shard=2)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


class Gate:
    """Holds up every thread that begins to write tensors until it is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._write = module.write_tensors
        self.reached = threading.Event()

    def __call__(self, *args: Any) -> Any:
        self.reached.set()
        assert self._open.wait(20)
        return self._write(*args)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    monkeypatch.setattr(module, "write_tensors", gate)
    yield gate
    gate.open()


@pytest.mark.parametrize("mode", MODES)
def test_parameters_changed_right_after_the_call_are_saved_as_they_were(
    tmp_path: Path, gate: Gate, mode: str
) -> None:
    """Case C4: an asynchronous save races with the update."""
    run, checkpoints = Run(Layout(), 0), manager(tmp_path, async_mode=mode, interval=1)
    run.train(2)
    saved = run.snapshot()
    assert checkpoints.maybe_save(2, run.state) is None
    run.train(3)
    with torch.no_grad():
        for parameter in run.state.model_parts[0].parameters():
            parameter.fill_(float("nan"))
    assert list_checkpoints(LocalRoot(tmp_path)) == []
    gate.open()
    checkpoints.complete()
    loaded = Run(Layout(), 0)
    assert manager(tmp_path).load(loaded.state) == 2
    np.testing.assert_equal(loaded.snapshot(), saved)


@pytest.mark.parametrize("mode", MODES)
def test_every_save_has_its_own_step_though_memory_is_used_again(tmp_path: Path, mode: str) -> None:
    run, checkpoints = Run(Layout(), 0), manager(tmp_path, async_mode=mode, interval=1)
    snapshots = {}
    for step in range(1, 5):
        run.train()
        snapshots[step] = run.snapshot()
        checkpoints.maybe_save(step, run.state)
    checkpoints.complete()
    for step, saved in snapshots.items():
        loaded = Run(Layout(), 0)
        assert manager(tmp_path, load_step=step).load(loaded.state) == step
        np.testing.assert_equal(loaded.snapshot(), saved)


def save_and_go_on(rank: int, layout: Layout, folder: Path) -> dict[str, Any]:
    run, checkpoints = Run(layout, rank), manager(folder, layout, async_mode="async", interval=1)
    for step in range(1, 6):
        run.train()
        saved = run.snapshot()
        checkpoints.maybe_save(step, run.state)
    run.train()
    checkpoints.complete()
    return saved


def load(rank: int, layout: Layout, folder: Path) -> dict[str, Any]:
    run = Run(layout, rank)
    assert manager(folder, layout).load(run.state) == 5
    return run.snapshot()


@pytest.mark.parametrize("layout", [TWO, Layout(pipeline=2, shard=2)], ids=lambda layout: layout.text)
def test_ranks_write_their_shards_while_they_train(tmp_path: Path, layout: Layout) -> None:
    ranks = layout.pipeline * layout.shard
    saved = run_ranks(save_and_go_on, ranks, layout, tmp_path)
    np.testing.assert_equal(run_ranks(load, ranks, layout, tmp_path), saved)
    assert names(tmp_path) == {f"step-{step}" for step in range(1, 6)}


def test_a_save_that_is_due_waits_for_the_one_before(tmp_path: Path, gate: Gate) -> None:
    run, checkpoints = Run(Layout(), 0), manager(tmp_path, async_mode="async", interval=1)
    run.train()
    checkpoints.maybe_save(1, run.state)
    assert gate.reached.wait(20)
    threading.Timer(0.1, gate.open).start()
    run.train()
    checkpoints.maybe_save(2, run.state)
    assert [found.step for found in list_checkpoints(LocalRoot(tmp_path)) if found.manifest] in ([1], [2, 1])
    checkpoints.complete()
    assert names(tmp_path) == {"step-1", "step-2"}


@pytest.mark.parametrize("how", ["last", "stop"])
def test_what_a_run_ends_with_is_saved_when_the_call_returns(tmp_path: Path, gate: Gate, how: str) -> None:
    run, checkpoints = Run(Layout(), 0), manager(tmp_path, async_mode="async", interval=2)
    run.train(2)
    checkpoints.maybe_save(2, run.state)
    threading.Timer(0.1, gate.open).start()
    run.train()
    assert str(checkpoints.maybe_save(3, run.state, **{how: True})) == str(tmp_path / "step-3")
    assert names(tmp_path) == {"step-2", "step-3"}
    assert checkpoints.latest is not None
    assert checkpoints.latest.step == 3


def test_a_stop_after_a_step_that_is_being_saved_waits_for_it_and_writes_it_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    run, checkpoints = Run(Layout(), 0), manager(tmp_path, async_mode="async", interval=2)
    run.train(2)
    checkpoints.maybe_save(2, run.state)
    checkpoints.maybe_save(2, run.state, stop=True)
    assert names(tmp_path) == {"step-2"}
    assert caplog.text.count("step-2 saved in") == 1


def test_a_checkpoint_is_kept_until_the_one_being_written_is_valid(tmp_path: Path, gate: Gate) -> None:
    """Case C1: retention counts saves in flight."""
    run, checkpoints = Run(Layout(), 0), manager(tmp_path, async_mode="async", interval=1, keep_latest_k=1)
    run.train()
    gate.open()
    checkpoints.maybe_save(1, run.state)
    checkpoints.complete()
    gate._open.clear()
    gate.reached.clear()
    run.train()
    checkpoints.maybe_save(2, run.state)
    assert gate.reached.wait(20)
    assert names(tmp_path) == {"step-1", "step-2.partial"}
    gate.open()
    checkpoints.complete()
    assert names(tmp_path) == {"step-2"}


def save_with_a_full_disk(rank: int, folder: Path, full_rank: int) -> dict[str, Any]:
    errors: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            errors.append(record.getMessage())

    logging.getLogger("trainer").addHandler(Collect(logging.ERROR))
    run, checkpoints = Run(TWO, rank), manager(folder, TWO, keep_latest_k=1, async_mode="async")
    between = []
    for step in (2, 4, 6):
        run.train(2)
        fill_the_disk(step == 4 and rank == full_rank)
        checkpoints.maybe_save(step, run.state)
        checkpoints.complete()
        torch.distributed.barrier()
        between.append(names(folder))
    return {"between": between, "errors": errors}


@pytest.mark.parametrize("full_rank", [0, 1])
def test_no_space_in_the_background_keeps_the_last_valid_checkpoint_and_the_run(
    tmp_path: Path, full_rank: int
) -> None:
    first, second = run_ranks(save_with_a_full_disk, 2, tmp_path, full_rank)
    assert first["between"] == second["between"] == [{"step-2"}, {"step-2"}, {"step-6"}]
    (message,) = first["errors"]
    assert "CHECKPOINT NOT SAVED at step 4" in message
    assert f"rank {full_rank}: " in message
    assert f"the latest valid checkpoint is {tmp_path / 'step-2'}" in message


def test_a_step_whose_save_failed_in_the_background_is_saved_when_the_run_ends_with_it(
    tmp_path: Path,
) -> None:
    run, checkpoints = Run(Layout(), 0), manager(tmp_path, async_mode="async", interval=2)
    run.train(2)
    fill_the_disk(True)
    checkpoints.maybe_save(2, run.state)
    checkpoints.complete()
    fill_the_disk(False)
    assert names(tmp_path) == set()
    assert checkpoints.maybe_save(2, run.state, stop=True) is not None
    assert names(tmp_path) == {"step-2"}


def test_what_is_no_failure_of_writing_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("a fault of the program")

    monkeypatch.setattr(module, "write_tensors", broken)
    run, checkpoints = Run(Layout(), 0), manager(tmp_path, async_mode="async", interval=1)
    run.train()
    checkpoints.maybe_save(1, run.state)
    with pytest.raises(KeyError, match="a fault of the program"):
        checkpoints.complete()
