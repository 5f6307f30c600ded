"""Inside a SLURM allocation: `srun` starts one task for each rank, on all nodes of the allocation.

srun's own exit code is the highest of its tasks', and a rank that is killed counts as 128 and more. Its option
--kill-on-bad-exit would kill the others at the first end of a rank that is no success, before the rank that knows
the cause has said it, and turn every exit code into 143. The ranks end each other by their watchdogs; --wait is for
those that cannot.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from trainer.cluster.node_list import expand_counts, expand_nodes
from trainer.cluster.ranks import in_step
from trainer.config.load import Loaded
from trainer.config.machine import visible_gpus
from trainer.config.processes import degrees_product
from trainer.errors import ConfigurationError, ExitCode
from trainer.ports import is_free, job_port
from trainer.run_folder import RunFolder
from trainer.stop import SAME_REQUEST, SIGNALS

FAILED_NODE = "STAGELINE_FAILED_NODE"
"""Names a file that receives the node whose rank failed first, for the batch script that starts the job again."""

_WAIT = 20  # seconds that the other ranks have to end by themselves, once one has ended
_SIGNALLED = 128  # and the signal's number, in the exit code of a task that was ended by one


@dataclass(frozen=True)
class Allocation:
    """The nodes that SLURM gave, and how many processors each has for the job."""

    job: int
    nodes: tuple[str, ...]
    cpus: tuple[int, ...]
    within_step: bool  # somebody types in a step of one task, and shares the allocation with what he starts

    @classmethod
    def find(cls, environment: Mapping[str, str]) -> Allocation | None:
        """The allocation in which this process may start ranks; None if there is none, or it is a rank itself.

        In a step of one task on a job's only node there is no need of srun.
        """
        nodes, job = environment.get("SLURM_JOB_NODELIST"), environment.get("SLURM_JOB_ID", "")
        if nodes is None or not job.isdecimal() or in_step(environment):
            return None
        names = expand_nodes(nodes)
        within_step = "SLURM_STEP_NUM_TASKS" in environment
        if within_step and len(names) == 1:
            return None
        cpus = expand_counts(environment.get("SLURM_JOB_CPUS_PER_NODE", f"1(x{len(names)})"))
        return cls(int(job), names, cpus, within_step)

    def processes(self, loaded: Loaded, environment: Mapping[str, str]) -> int:
        """Ranks of each node: NGPU, else one for each GPU, else the job's tasks, else what the degrees need.

        Raises ConfigurationError if they cannot be the same on every node.
        """
        named = environment.get("NGPU")
        if named is not None:
            if not (named.isdecimal() and int(named) > 0):
                raise ConfigurationError(
                    f"environment: NGPU = {named!r}: the number of processes on each node, at least 1"
                )
            return int(named)
        gpus = environment.get("SLURM_GPUS_ON_NODE", "")
        if gpus.isdecimal() and int(gpus) > 0:
            return int(gpus)
        if self._is_here() and visible_gpus():
            return visible_gpus()
        tasks = environment.get("SLURM_NTASKS")
        total, what = (
            (int(tasks), "SLURM_NTASKS")
            if tasks is not None
            else (degrees_product(loaded.config), "the configured degrees")
        )
        if total % len(self.nodes):
            raise ConfigurationError(
                f"environment: {what}: {total} processes on {len(self.nodes)} nodes are not the same number on each; "
                "NGPU says how many each shall have"
            )
        return total // len(self.nodes)

    def port(self) -> int:
        """Where the ranks meet, on the first node; looked at beforehand if this is that node."""
        ports = (job_port(self.job, 0, attempt) for attempt in range(100))
        return next((port for port in ports if not self._is_here() or is_free(port)), job_port(self.job, 0))

    def command(self, processes: int, program: Sequence[str]) -> list[str]:
        """Of srun, to run a program as so many ranks on every node."""
        cpus = min(self.cpus) // processes
        return [
            "srun",
            f"--nodes={len(self.nodes)}",
            f"--ntasks={len(self.nodes) * processes}",
            f"--ntasks-per-node={processes}",
            f"--cpus-per-task={max(1, cpus)}",
            "--distribution=block",
            "--kill-on-bad-exit=0",
            f"--wait={_WAIT}",
            *(["--overcommit"] if cpus < 1 else []),
            *(["--overlap"] if self.within_step else []),
            *program,
        ]

    def _is_here(self) -> bool:
        return socket.gethostname().split(".")[0] == self.nodes[0].split(".")[0]


def run_ranks(allocation: Allocation, loaded: Loaded, processes: int, program: Sequence[str]) -> int:
    """Start the ranks, wait for them, and return the exit code of the job. Raises ConfigurationError without srun."""
    if shutil.which("srun") is None:
        raise ConfigurationError("environment: SLURM_JOB_ID is set, but there is no srun on the PATH")
    step = _Step(
        subprocess.Popen(
            allocation.command(processes, program),
            env=_environment(allocation, processes),
            start_new_session=True,
        )
    )
    for number in SIGNALS:
        signal.signal(number, step.pass_on)
    code = step.wait()
    if code == ExitCode.RANK_FAILED:
        _name_the_node(RunFolder.of(loaded).failure_record, allocation, processes)
    return code


def _environment(allocation: Allocation, processes: int) -> dict[str, str]:
    threads = max(1, min(allocation.cpus) // processes)
    return {
        "OMP_NUM_THREADS": str(threads),
        "MASTER_PORT": str(allocation.port()),
        **os.environ,
        "PYTHONUNBUFFERED": "1",
    }


@dataclass
class _Step:
    """srun while it runs."""

    process: subprocess.Popen[bytes]
    asked: float | None = None  # when a signal came first

    def pass_on(self, _number: int, _frame: FrameType | None) -> None:
        """Of the signals that ask ranks to stop, SIGUSR1 is the one that srun hands to them; at the others it ends
        them, as it shall when one is asked for the second time."""
        now = time.monotonic()
        if self.asked is None:
            self.asked = now
            self.process.send_signal(signal.SIGUSR1)
        elif now - self.asked > SAME_REQUEST:
            self.process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        code = self.process.wait()
        if code in tuple(ExitCode):
            return code
        ended_by = abs(code) if code < 0 else code - _SIGNALLED
        # A rank that had not yet come to the point from where a signal means something else.
        if ended_by in SIGNALS:
            return ExitCode.STOPPED_ON_REQUEST
        print(f"stageline: a rank was killed (srun's exit code is {code})", file=sys.stderr)
        return ExitCode.RANK_FAILED


def _name_the_node(record: Path, allocation: Allocation, processes: int) -> None:
    """Say where the rank was that failed first, if it is known."""
    try:
        rank = int(json.loads(record.read_text(encoding="utf-8"))["rank"])
    except (OSError, ValueError, KeyError):
        return
    node = allocation.nodes[min(rank // processes, len(allocation.nodes) - 1)]
    print(f"stageline: rank {rank} was on {node}", file=sys.stderr)
    if file := os.environ.get(FAILED_NODE):
        Path(file).write_text(f"{node}\n", encoding="utf-8")
