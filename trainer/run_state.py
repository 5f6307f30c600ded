"""state.json of a run folder: who works on the run, and how it ended. Written by rank 0, read without torch."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

STATE_NAME = "state.json"


class Phase(StrEnum):
    """Of a run, as its rank 0 wrote it last."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"  # on request, its state saved


@dataclass(frozen=True)
class RunState:
    """The last start of a run.

    Attributes:
        phase: what was written last; a process that was killed leaves RUNNING.
        step: training steps made, when it ended.
        host, process, born: of rank 0: the machine, the process's number, and when it began in clock ticks since the
            machine did (0 where that is not known), which tells it from a later one of the same number.
        started, written: seconds since 1970.
        job: of SLURM.
    """

    phase: Phase
    step: int | None
    host: str
    process: int
    born: int
    started: float
    written: float
    job: str | None = None

    @classmethod
    def begin(cls) -> RunState:
        """This process works on the run from now on."""
        now, process = time.time(), os.getpid()
        job = os.environ.get("SLURM_JOB_ID")
        return cls(Phase.RUNNING, None, socket.gethostname(), process, _born(process), now, now, job)

    @property
    def is_here(self) -> bool:
        """Whether it runs, or ran, on this machine."""
        return self.host == socket.gethostname()

    @property
    def process_lives(self) -> bool:
        """Whether the process is there; for a run on this machine."""
        return self.born != 0 and _born(self.process) == self.born


def write_state(folder: Path, state: RunState) -> None:
    """Readers see the whole file or the former one."""
    partial = folder / f".{STATE_NAME}.partial"
    partial.write_text(json.dumps(asdict(state)) + "\n", encoding="utf-8")
    partial.replace(folder / STATE_NAME)


def read_state(folder: Path) -> RunState | None:
    """None if there is none, or it cannot be understood."""
    try:
        fields = json.loads((folder / STATE_NAME).read_text(encoding="utf-8"))
        return RunState(**{**fields, "phase": Phase(fields["phase"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _born(process: int) -> int:
    try:
        # proc(5): field 22, counted behind the name in brackets, which may hold anything.
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0
