"""Checkpoints in the whole program: in the background and in a store of objects, the run is the same."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.objects import url
from tests.distributed.program import Forked, pipeline, rows, run, tiny, values
from tests.distributed.test_experts import DEEPSEEK
from tests.distributed.test_experts import arguments as deepseek
from tests.distributed.test_stop import in_step
from trainer.checkpoint import manager
from trainer.checkpoint.weights import find_trained_model
from trainer.errors import ExitCode

ASYNC = "--checkpoint.async_mode async --checkpoint.interval 2"


def test_a_run_that_saves_in_the_background_in_a_store_goes_on_as_if_it_had_not_ended(tmp_path: Path) -> None:
    straight, stored = tmp_path / "straight", tmp_path / "stored"
    run(tiny(straight, pipeline(2), "--checkpoint.interval 3", steps=8), 2)
    there = f"--checkpoint.folder {url(tmp_path / 'bucket')} {ASYNC} --checkpoint.keep_latest_k 2"
    run(tiny(stored, pipeline(2), there, steps=4), 2)
    said = run(tiny(stored, pipeline(2), there, steps=8), 2)
    assert "resumed     after step 4" in said
    assert f"checkpoint  {url(tmp_path / 'bucket')}/step-8" in said
    assert rows(stored) == rows(straight)
    assert not (stored / "checkpoint").exists()
    assert sorted(os.listdir(tmp_path / "bucket")) == ["step-6", "step-8"]
    assert find_trained_model(stored).step == 8
    # Another run starts from these weights.
    tuned = tmp_path / "tuned"
    start = f"--checkpoint.initial_load_path {url(tmp_path / 'bucket')}"
    assert f"weights of {url(tmp_path / 'bucket')}/step-8" in run(tiny(tuned, start, steps=1))
    assert rows(tuned)[0]["loss"] < rows(straight)[0]["loss"]


def test_a_stop_completes_the_save_that_is_running_and_saves_the_step(tmp_path: Path) -> None:
    arguments = tiny(tmp_path, pipeline(2), ASYNC)
    assert (
        Forked.start(arguments, 2, in_step(3, 1, signal.SIGTERM)).wait() == [ExitCode.STOPPED_ON_REQUEST] * 2
    )
    assert sorted(os.listdir(tmp_path / "checkpoint")) == ["step-2", "step-3"]
    assert "resumed     after step 3" in run(arguments, 2)


def dies_while_saving(step: int, rank: int) -> Callable[[int], None]:
    """In the background: after its tensors are written, while training goes on."""

    def before(own: int) -> None:
        write_tensors = manager.write_tensors

        def killed(folder: Any, *args: Any) -> Any:
            written = write_tensors(folder, *args)
            if own == rank and f"step-{step}" in str(folder):
                os.kill(os.getpid(), signal.SIGKILL)
            return written

        manager.write_tensors = killed  # type: ignore[assignment]

    return before


@pytest.mark.slow
def test_a_run_killed_while_it_saved_in_the_background_is_the_same_run(tmp_path: Path) -> None:
    straight, killed = (tiny(tmp_path / name, ASYNC, steps=7) for name in ("straight", "killed"))
    run(straight, 2)
    assert -signal.SIGKILL in Forked.start(killed, 2, dies_while_saving(4, rank=1)).wait()
    assert "resumed     after step 2" in run(killed, 2)
    assert rows(tmp_path / "killed") == rows(tmp_path / "straight")


@pytest.mark.slow
def test_experts_and_tensor_shards_copied_in_the_background_go_on_in_another_layout(tmp_path: Path) -> None:
    batch = f"{DEEPSEEK} {ASYNC} --training.global_batch_size 8"
    layouts = (
        (2, "--experimental.expert_parallel_degree 2 --training.batch_size 4"),
        (
            4,
            "--training.tensor_parallel_degree 2 --experimental.expert_parallel_degree 2 --training.batch_size 4",
        ),
        (1, "--training.batch_size 8"),
    )
    run(deepseek(tmp_path / "straight", batch, "--training.batch_size 8", steps=6))
    for steps, (ranks, layout) in zip((2, 4, 6), layouts, strict=True):
        run(deepseek(tmp_path / "changing", batch, layout, steps=steps), ranks)
    for key in ("loss", "grad_norm", "validation_loss", "lr"):
        straight, changing = values(tmp_path / "straight", key), values(tmp_path / "changing", key)
        assert changing == pytest.approx(straight, rel=1e-4)
