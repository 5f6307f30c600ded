"""Runs that are killed by signal 9 again and again, at moments drawn from a seed, until they are done.

A moment is either one of the calls by which a rank changes the folder of checkpoints (open for writing, rename,
remove, make or remove a folder), whichever thread makes it: so kills fall into every part of saving, of the manifest
and of retention, however these are written; or it is a time after a step has begun.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing.connection
import os
import random
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.distributed.program import Forked, rows, run
from trainer.loop import Loop, StepResult

_CHANGES = frozenset(
    {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate", "shutil.rmtree"}
)


@dataclass(frozen=True)
class Moment:
    """When a rank is killed: at its n-th change of the folder of checkpoints, or so long after its first step began."""

    rank: int
    change: int | None = None
    seconds: float | None = None

    def arm(self, rank: int) -> None:
        """In the process of each rank, before the program."""
        if rank != self.rank:
            return
        if self.change is not None:
            _at_change(self.change, die)
        train_step, seconds = Loop.train_step, self.seconds
        if seconds is not None:

            def timed(loop: Any) -> StepResult:
                Loop.train_step = train_step  # type: ignore[method-assign]
                threading.Timer(seconds, die).start()
                return train_step(loop)

            Loop.train_step = timed  # type: ignore[method-assign]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _at_change(number: int, call: Any) -> None:
    """Call at the n-th change, before it is made."""
    count = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event in _CHANGES or (event == "open" and _writes(arguments)):
            count += "/checkpoint" in str(arguments[0])
            if count == number:
                call()

    sys.addaudithook(hook)


def _writes(arguments: tuple[Any, ...]) -> bool:
    return isinstance(arguments[2], int) and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


@dataclass
class Drill:
    """Compares runs that are killed with one that is not.

    Attributes:
        folder: for all runs.
        arguments: of the program, apart from the folder.
        ranks: processes of the run; where one is killed, all are, as when a node is lost.
        seed: of the moments.
    """

    folder: Path
    arguments: Any
    ranks: int
    seed: int

    def kill(self, times: int, changes_per_save: int) -> list[Moment]:
        """Kill runs so often; each is resumed until it is done, and is then the same as the straight one.

        Args:
            times: of kills, over as many runs as they take.
            changes_per_save: of the folder of checkpoints by one rank, about.

        Returns:
            The moments of the kills.
        """
        straight = self.folder / "straight"
        run(self.arguments(straight), self.ranks)
        assert contents(straight)
        draw, killed_at, number = random.Random(self.seed), [], 0
        while len(killed_at) < times:
            number += 1
            target = self.folder / f"killed-{number}"
            done = False
            while not done and len(killed_at) < times:
                moment = self._draw(draw, changes_per_save)
                before = latest_valid(target)
                done = self._start(target, moment)
                if not done:
                    killed_at.append(moment)
                assert latest_valid(target) >= before, f"seed {self.seed}: {moment} lost a checkpoint"
            before = latest_valid(target)
            said = run(self.arguments(target), self.ranks)
            assert not before or f"resumed     after step {before}\n" in said
            assert rows(target) == rows(straight), f"seed {self.seed}: {killed_at}"
            assert contents(target) == contents(straight), f"seed {self.seed}: {killed_at}"
            assert not list((target / "checkpoint").glob("*.partial*")), (
                "what is left of a save is cleaned up"
            )
        return killed_at

    def _draw(self, draw: random.Random, changes_per_save: int) -> Moment:
        rank = draw.randrange(self.ranks)
        if draw.random() < 0.7:
            return Moment(rank, change=draw.randint(1, 3 * changes_per_save))
        return Moment(rank, seconds=draw.uniform(0.0, 0.3))

    def _start(self, target: Path, moment: Moment) -> bool:
        """Whether the run came to its end before the moment did."""
        job = Forked.start(self.arguments(target), self.ranks, moment.arm)
        try:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                alive = [process for process in job.ranks if process.is_alive()]
                codes = [process.exitcode for process in job.ranks if process not in alive]
                if any(codes):
                    assert set(codes) - {0, 4} == {-signal.SIGKILL}, job.said
                    return False
                if not alive:
                    return True
                multiprocessing.connection.wait([process.sentinel for process in alive], 1.0)
            raise TimeoutError(job.said)
        finally:
            job.kill()
            for process in job.ranks:
                process.join()


def latest_valid(folder: Path) -> int:
    """The latest step with a manifest whose every file is there, byte for byte; 0: none."""
    named = ((path, path.parent.name[5:]) for path in (folder / "checkpoint").glob("step-*/manifest.json"))
    return max((int(step) for path, step in named if step.isdecimal() and _is_whole(path)), default=0)


def _is_whole(manifest: Path) -> bool:
    files = json.loads(manifest.read_text())["files"]
    return all(_digest(manifest.parent / entry["name"]) == entry["sha256"] for entry in files)


def _digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None


def contents(folder: Path) -> dict[str, str | None]:
    """What the last checkpoint holds, tensors as well as counters: digests of its files."""
    last = folder / "checkpoint" / f"step-{latest_valid(folder)}"
    return {path.name: _digest(path) for path in sorted(last.glob("*.distcp"))}
