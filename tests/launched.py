"""Jobs of real processes, started by the launcher or by torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

ROOT = Path(__file__).resolve().parents[1]
LAUNCHER = (sys.executable, "-m", "trainer.launch")


@dataclass(frozen=True)
class Launched:
    """A job of real processes, all of which carry a mark in their environment by which they are found."""

    process: subprocess.Popen[str]
    mark: str

    def members(self) -> dict[int, int | None]:
        """Process id and, of a rank, its number, of what runs of this job."""
        found: dict[int, int | None] = {}
        for folder in Path("/proc").iterdir():
            environment = _environment_of(folder) if folder.name.isdecimal() else {}
            if environment.get("STAGELINE_TEST_JOB") == self.mark:
                rank = environment.get("RANK")
                found[int(folder.name)] = None if rank is None else int(rank)
        return found

    def rank(self, number: int) -> int:
        """The process id of a rank."""
        return next(pid for pid, rank in self.members().items() if rank == number)

    def wait_for(self, condition: Callable[[], bool], what: str, timeout: float = 90.0) -> None:
        """Until the condition holds; fails if the job ends before or it takes too long."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert self.process.poll() is None, f"the job ended before there was {what}"
            assert time.monotonic() < deadline, f"no {what} within {timeout} s"
            time.sleep(0.05)

    def end(self, timeout: float = 60.0) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        out, err = self.process.communicate(timeout=timeout)
        return self.process.returncode, out, err


@contextmanager
def launched(
    arguments: Sequence[str], command: Sequence[str] = LAUNCHER, **environment: str
) -> Iterator[Launched]:
    """Start the launcher (or another command) with the arguments; nothing of the job outlives the block."""
    mark = uuid4().hex
    inherited = {name: value for name, value in os.environ.items() if name != "NGPU"}
    process = subprocess.Popen(
        [*command, *arguments],
        env={**inherited, "PYTHONPATH": str(ROOT), "STAGELINE_TEST_JOB": mark, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    job = Launched(process, mark)
    try:
        yield job
    finally:
        for pid in job.members():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def _environment_of(folder: Path) -> dict[str, str]:
    try:
        text = (folder / "environ").read_bytes().decode(errors="replace")
    except OSError:  # it has ended meanwhile
        return {}
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)
