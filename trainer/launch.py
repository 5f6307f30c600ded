"""The launcher behind `run_train.sh`: checks the configuration, then starts one process for each rank.

On one machine they are its own children; in a SLURM allocation `srun` starts them on all nodes; as a task of srun
it becomes a rank itself.

`train.py` runs equally under torchrun or srun. This launcher exists since it starts faster, and since its exit
code is that of the rank that failed (torchrun's is always 1). It imports no torch, so a wrong configuration is
refused in well under a second, before anything else happens.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType

from trainer.cluster.ranks import in_step
from trainer.cluster.srun import Allocation, run_ranks
from trainer.config.load import Loaded, load
from trainer.config.processes import processes_needed
from trainer.config.rules import check_for_planning, check_for_training
from trainer.config.study import is_study
from trainer.errors import ConfigurationError, ExitCode, StagelineError
from trainer.ports import free_port
from trainer.stop import SIGNALS, Meaning, Requests
from trainer.time_limit import STARTED

_TRAIN = Path(__file__).resolve().parent.parent / "train.py"
_PR_SET_PDEATHSIG = 1  # sys/prctl.h
_SECONDS_TO_END = 8.0  # for the other ranks, once one has ended with an error, which the watchdogs agreed on
_SECONDS_TO_NOTICE = 7.0  # longer, if it was killed, of which the watchdogs must first become aware


def main(argv: Sequence[str] | None = None) -> int:
    """Launch, wait, and return the exit code of the job."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if in_step(os.environ):  # srun has started this as a rank
        os.execv(sys.executable, [sys.executable, str(_TRAIN), *arguments])
    try:
        if is_study(arguments):
            os.execv(sys.executable, [sys.executable, "-m", "trainer.commands.main", "sweep", *arguments])
        allocation = Allocation.find(os.environ)
        if allocation is not None:
            return _run_in(allocation, arguments)
        loaded = load(arguments)
        processes = _processes(loaded)
    except StagelineError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    os.environ.setdefault(STARTED, str(int(time.time())))
    restarts = loaded.config.job.max_restarts
    if processes == 1 and not restarts:
        os.execve(sys.executable, [sys.executable, str(_TRAIN), *arguments], _environment(0, 1, free_port()))
    return _run(arguments, processes, restarts)


def _run(arguments: Sequence[str], processes: int, restarts: int) -> int:
    """The job, and again where a rank failed: what was configured wrong, asked for, or learned wrong stays so."""
    requests = Requests()
    for restart in range(restarts + 1):
        if restart:
            print(
                f"stageline: starting again from the last checkpoint, {restart} of {restarts}",
                file=sys.stderr,
            )
        code = _Job.start(arguments, processes, requests).wait()
        if code != ExitCode.RANK_FAILED or requests.first is not None:
            break
    return code


def _run_in(allocation: Allocation, arguments: Sequence[str]) -> int:
    """The job on all nodes of a SLURM allocation. What else must be true of the nodes, the ranks check there."""
    loaded = load(arguments)
    processes = allocation.processes(loaded, os.environ)
    check_for_planning(loaded, processes * len(allocation.nodes))
    return run_ranks(allocation, loaded, processes, [sys.executable, str(_TRAIN), *arguments])


def _processes(loaded: Loaded) -> int:
    asked = os.environ.get("NGPU")
    if asked is not None and not (asked.isdecimal() and int(asked) > 0):
        raise ConfigurationError(
            f"environment: NGPU = {asked!r}: the number of processes on this node, at least 1"
        )
    processes = int(asked) if asked else processes_needed(loaded.config)
    check_for_training(loaded, processes)
    return processes


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
    """The local processes of one job.

    Each is in a session of its own, so that Ctrl-C at a terminal reaches the launcher alone, which passes it on:
    once, as a request to stop. Whatever ends the launcher, SIGKILL included, ends them too.
    """

    processes: list[subprocess.Popen[bytes]]
    first_failure: tuple[int, int] | None = None  # (rank, return code)
    requests: Requests = field(default_factory=Requests)
    given_up: bool = False  # asked for a second time: the ranks were killed

    @classmethod
    def start(cls, arguments: Sequence[str], count: int, requests: Requests) -> _Job:
        """`requests`: what the launcher has been asked for, also between two attempts."""
        port = free_port()
        command = [sys.executable, str(_TRAIN), *arguments]
        end_with_launcher = partial(_end_with, os.getpid())
        job = cls(
            [
                subprocess.Popen(
                    command,
                    env=_environment(rank, count, port),
                    start_new_session=True,
                    preexec_fn=end_with_launcher,
                )
                for rank in range(count)
            ],
            requests=requests,
        )
        for number in SIGNALS:
            signal.signal(number, job._pass_on)
        if requests.first is not None:
            job._send(requests.first)
        return job

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        """The first signal is passed on; at one that means it there is no more waiting."""
        meaning = self.requests.receive(number, time.monotonic())
        if meaning is Meaning.STOP:
            self._send(number)
        elif meaning is Meaning.AT_ONCE:
            self.given_up = True
            self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
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
                    killed = self.first_failure[1] < 0
                    deadline = time.monotonic() + _SECONDS_TO_END + killed * _SECONDS_TO_NOTICE
            if time.monotonic() > deadline:
                self._send(signal.SIGKILL)
            time.sleep(0.05)
        self._look_for_failure()
        return self._exit_code()

    def _look_for_failure(self) -> None:
        for rank, process in enumerate(self.processes):
            code = process.poll()
            if self.first_failure is None and code not in (None, 0):
                self.first_failure = (rank, code)

    def _exit_code(self) -> int:
        if self.given_up:
            print("stageline: ended at once, as asked for by a second signal", file=sys.stderr)
            return ExitCode.OTHER
        if self.first_failure is None:
            return ExitCode.DONE
        rank, code = self.first_failure
        if (
            self.requests.first is not None and -code in SIGNALS
        ):  # it had not yet come to the point from where a signal means something else
            return ExitCode.STOPPED_ON_REQUEST
        if code < 0:
            print(f"stageline: rank {rank} was killed by {signal.Signals(-code).name}", file=sys.stderr)
            return ExitCode.RANK_FAILED
        return code


def _end_with(launcher: int) -> None:
    """In a new process, before it becomes a rank: the kernel kills it when the launcher ends. On Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != launcher:  # which ended before the kernel knew
            os._exit(ExitCode.OTHER)


if __name__ == "__main__":
    sys.exit(main())
