"""Who this process is in the job, in the names that torchrun uses, whoever started it: SLURM, MPI, or torchrun.

Everything else reads RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from trainer.cluster.node_list import expand_counts, expand_nodes
from trainer.errors import ConfigurationError
from trainer.ports import job_port

NODES = "STAGELINE_NODES"
"""The hosts of the job, in order and with commas between them, where they are known: to name one that is missing."""


@dataclass(frozen=True)
class _Names:
    """Of the variables in which a launcher that is not SLURM tells a process its place."""

    launcher: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str


_OPEN_MPI = _Names(
    "mpirun",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
_HYDRA = _Names("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What is to be added to the environment of this process. Nothing, if torchrun or our launcher has set it, or if
    it was started alone.

    mpirun may itself have been started by srun, whose variables its ranks inherit: the launcher nearest to the
    process counts. Raises ConfigurationError if a launcher's variables are no numbers or leave something open.
    """
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return {}
    if _OPEN_MPI.world_size in environment:
        return _of_mpi(_OPEN_MPI, environment)
    tasks = environment.get("SLURM_STEP_NUM_TASKS")
    if _HYDRA.world_size in environment and environment[_HYDRA.world_size] != tasks:
        return _of_mpi(_HYDRA, environment)
    return _of_slurm(environment) if in_step(environment) else {}


def in_step(environment: Mapping[str, str]) -> bool:
    """Whether this process is one of several tasks that srun started. One task alone is where somebody types."""
    return environment.get("SLURM_STEP_NUM_TASKS", "1") != "1"


def _of_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    node = _number(environment, "SLURM_NODEID")
    nodes = expand_nodes(_text(environment, "SLURM_STEP_NODELIST"))
    tasks = expand_counts(_text(environment, "SLURM_STEP_TASKS_PER_NODE"))
    if not (len(nodes) == len(tasks) > node):
        raise ConfigurationError(
            f"environment: SLURM_STEP_NODELIST names {len(nodes)} nodes, SLURM_STEP_TASKS_PER_NODE {len(tasks)}, "
            f"and SLURM_NODEID is {node}"
        )
    job, step = _number(environment, "SLURM_JOB_ID"), _number(environment, "SLURM_STEP_ID")
    return {
        "RANK": str(_number(environment, "SLURM_PROCID")),
        "LOCAL_RANK": str(_number(environment, "SLURM_LOCALID")),
        "WORLD_SIZE": str(_number(environment, "SLURM_STEP_NUM_TASKS")),
        "LOCAL_WORLD_SIZE": str(tasks[node]),
        "MASTER_ADDR": environment.get("MASTER_ADDR", nodes[0]),
        "MASTER_PORT": environment.get("MASTER_PORT", str(job_port(job, step))),
        NODES: ",".join(nodes),
    }


def _of_mpi(names: _Names, environment: Mapping[str, str]) -> dict[str, str]:
    world_size, local = (_number(environment, name) for name in (names.world_size, names.local_world_size))
    address = environment.get("MASTER_ADDR")
    if address is None and "SLURM_JOB_NODELIST" in environment:
        address = expand_nodes(environment["SLURM_JOB_NODELIST"])[0]
    if address is None and world_size == local:
        address = "127.0.0.1"
    port = environment.get("MASTER_PORT")
    if port is None and "SLURM_JOB_ID" in environment:
        port = str(job_port(_number(environment, "SLURM_JOB_ID"), 0))
    if port is None and world_size == local:
        port = str(job_port(os.getppid(), 0))  # the launcher, which all of them have in common
    if address is None or port is None:
        raise ConfigurationError(
            f"environment: {names.launcher} does not say where rank 0 is: export MASTER_ADDR, the host of rank 0, and "
            "MASTER_PORT, a port that is free there"
        )
    return {
        "RANK": str(_number(environment, names.rank)),
        "LOCAL_RANK": str(_number(environment, names.local_rank)),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }


def _text(environment: Mapping[str, str], name: str) -> str:
    value = environment.get(name)
    if value is None:
        raise ConfigurationError(
            f"environment: {name} is not set, which the launcher of this process should have done"
        )
    return value


def _number(environment: Mapping[str, str], name: str) -> int:
    value = _text(environment, name)
    if not value.isdecimal():
        raise ConfigurationError(f"environment: {name} = {value!r}: expected a number")
    return int(value)
