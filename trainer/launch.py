"""The launcher behind `run_train.sh`: checks the configuration, then starts one process for each local rank.

`train.py` runs equally under torchrun or srun. This launcher exists since it starts faster, and since its exit
code is that of the rank that failed (torchrun's is always 1). It imports no torch, so a wrong configuration is
refused in well under a second, before anything else happens.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from trainer.config.load import load
from trainer.config.processes import processes_needed
from trainer.config.rules import check_for_training
from trainer.errors import ConfigurationError, ExitCode, StagelineError

_TRAIN = Path(__file__).resolve().parent.parent / "train.py"
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_SECONDS_TO_END = 15.0  # for the other ranks, once one has ended with an error


def main(argv: Sequence[str] | None = None) -> int:
    """Launch, wait, and return the exit code of the job."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        processes = _processes(arguments)
    except StagelineError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if processes == 1:
        os.execve(sys.executable, [sys.executable, str(_TRAIN), *arguments], _environment(0, 1, _free_port()))
    return _Job.start(arguments, processes).wait()


def _processes(arguments: Sequence[str]) -> int:
    loaded = load(arguments)
    asked = os.environ.get("NGPU")
    if asked is not None and not (asked.isdecimal() and int(asked) > 0):
        raise ConfigurationError(
            f"environment: NGPU = {asked!r}: the number of processes on this node, at least 1"
        )
    processes = int(asked) if asked else processes_needed(loaded.config)
    check_for_training(loaded, processes)
    return processes


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    # One thread per process unless told otherwise: ranks that share a machine's cores must not each use them all.
    threads = max(1, (os.cpu_count() or 1) // world_size)
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    return environment | {
        **{name: str(value) for name, value in names.items()},
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONUNBUFFERED": "1",
    }


@dataclass
class _Job:
    """The local processes of one job."""

    processes: list[subprocess.Popen[bytes]]
    first_failure: tuple[int, int] | None = field(default=None)  # (rank, return code)

    @classmethod
    def start(cls, arguments: Sequence[str], count: int) -> _Job:
        port = _free_port()
        command = [sys.executable, str(_TRAIN), *arguments]
        job = cls([subprocess.Popen(command, env=_environment(rank, count, port)) for rank in range(count)])
        for number in _FORWARDED:
            signal.signal(number, job._forward)
        return job

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def wait(self) -> int:
        """Until every process has ended; those that outlive a failed one for too long are killed."""
        deadline = float("inf")
        while any(process.poll() is None for process in self.processes):
            if self.first_failure is None:
                self._look_for_failure()
                if self.first_failure is not None:
                    deadline = time.monotonic() + _SECONDS_TO_END
            if time.monotonic() > deadline:
                for process in self.processes:
                    process.kill()
            time.sleep(0.05)
        self._look_for_failure()
        return self._exit_code()

    def _look_for_failure(self) -> None:
        for rank, process in enumerate(self.processes):
            code = process.poll()
            if self.first_failure is None and code not in (None, 0):
                self.first_failure = (rank, code)

    def _exit_code(self) -> int:
        if self.first_failure is None:
            return ExitCode.DONE
        rank, code = self.first_failure
        if code < 0:
            print(f"stageline: rank {rank} was killed by {signal.Signals(-code).name}", file=sys.stderr)
            return ExitCode.RANK_FAILED
        return code


if __name__ == "__main__":
    sys.exit(main())
