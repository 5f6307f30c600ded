"""Killed by signal 9 at any change of a file: in a save, in the background or not, of the manifest, of retention.

`STAGELINE_KILLS=all` kills at every one of them; by default some are drawn, by the seed in the name of the test, which
`STAGELINE_KILL_SEED` sets.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoint.objects import url
from tests.checkpoint.tiny import Layout, Run, manager
from tests.distributed.ranks import RankError, run_ranks
from trainer.checkpoint.filesystem import open_root

SEED = int(os.environ.get("STAGELINE_KILL_SEED", random.randrange(10**6)))
DRAWN = 7

CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir"}


def root_of(folder: Path, kind: str) -> Any:
    return open_root(folder, url(folder / "checkpoint") if kind == "objects" else "checkpoint")


class Changes:
    """Counts the changes of files and folders that this process makes, and ends it before the n-th."""

    def __init__(self, folder: Path, fatal: int) -> None:
        self.count = 0
        self._folder = str(folder)
        self._fatal = fatal
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: Any) -> None:
        opened = event == "open" and str(arguments[0]).startswith(self._folder) and arguments[2] & os.O_CREAT
        if opened or event in CHANGES:
            self.count += 1
            if self.count == self._fatal:
                os.kill(os.getpid(), signal.SIGKILL)


def save_and_die(_rank: int, folder: Path, kind: str, mode: str, fatal: int) -> int:
    """Saves of steps 1, 2, 3 and once more 2, as after going back, one being kept; notes what has been saved."""
    run = Run(Layout(), 0)
    checkpoints = manager(root_of(folder, kind), interval=1, keep_latest_k=1, async_mode=mode)
    notes = os.open(folder / "saved", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    changes = Changes(folder / "checkpoint", fatal)
    for step in (1, 2, 3):
        run.train()
        checkpoints.maybe_save(step, run.state)
        checkpoints.complete()
        os.write(notes, f"{step}\n".encode())
    run = Run(Layout(), 0)
    run.train(3)
    checkpoints.save(3, run.state)
    return changes.count


@cache
def snapshot(step: int) -> dict[str, Any]:
    run = Run(Layout(), 0)
    run.train(step)
    return run.snapshot()


def assert_nothing_saved_is_lost(folder: Path, kind: str, overwriting: bool) -> None:
    noted = [int(line) for line in (folder / "saved").read_text().split()]
    run = Run(Layout(), 0)
    step = manager(root_of(folder, kind)).load(run.state)
    if overwriting and kind == "objects" and step is None:
        return  # what is begun anew there is gone: no rename (see remote.py)
    assert (step or 0) >= max(noted, default=0)
    np.testing.assert_equal(run.snapshot(), snapshot(step or 0))
    left = root_of(folder, kind).names()
    assert len(left) <= 2, left
    assert not [name for name in left if "." in name]
    # And it can be saved and go on from there.
    run.train()
    checkpoints = manager(root_of(folder, kind), keep_latest_k=1)
    assert checkpoints.save((step or 0) + 1, run.state) is not None
    assert manager(root_of(folder, kind)).load(Run(Layout(), 0).state) == (step or 0) + 1
    assert root_of(folder, kind).names() == [f"step-{(step or 0) + 1}"]


@pytest.mark.parametrize(
    ("kind", "mode"), [("local", "disabled"), ("local", "async"), ("objects", "disabled")]
)
def test_killed_at_any_change_of_a_file_nothing_that_was_saved_is_lost(
    tmp_path: Path, kind: str, mode: str
) -> None:
    (total,) = run_ranks(save_and_die, 1, _made(tmp_path / "whole"), kind, mode, 0, process_group=False)
    assert total > 25
    everything = os.environ.get("STAGELINE_KILLS") == "all"
    fatal = range(1, total + 1)
    print(f"STAGELINE_KILL_SEED={SEED}")
    for number in fatal if everything else random.Random(SEED).sample(fatal, DRAWN):
        folder = _made(tmp_path / str(number))
        with pytest.raises(RankError, match="died"):
            run_ranks(save_and_die, 1, folder, kind, mode, number, process_group=False)
        noted = (folder / "saved").read_text().split()
        assert_nothing_saved_is_lost(folder, kind, overwriting=len(noted) == 3)


def die_in_a_file(_rank: int, folder: Path, mode: str, size: int) -> None:
    run, checkpoints = Run(Layout(), 0), manager(folder / "checkpoint", interval=1, async_mode=mode)
    run.train()
    checkpoints.save(1, run.state)
    (folder / "saved").write_text("1")
    run.train()
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # ends the process in the call that would write more
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    checkpoints.maybe_save(2, run.state)
    checkpoints.complete()


@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize("size", [0, 5000])
def test_killed_in_the_middle_of_a_file_the_checkpoint_before_stays(
    tmp_path: Path, mode: str, size: int
) -> None:
    with pytest.raises(RankError, match="died"):
        run_ranks(die_in_a_file, 1, tmp_path, mode, size, process_group=False)
    assert (tmp_path / "checkpoint" / "step-2.partial").is_dir()
    assert_nothing_saved_is_lost(tmp_path, "local", overwriting=False)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
