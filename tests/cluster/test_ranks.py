"""Who a process is, whoever started it: variables as SLURM 22.05, Open MPI and Hydra set them."""

from __future__ import annotations

import os

import pytest

from trainer.cluster.ranks import NODES, in_step, rank_variables
from trainer.cluster.srun import Allocation
from trainer.config.load import load
from trainer.errors import ConfigurationError
from trainer.ports import job_port

Environment = dict[str, str]

BATCH = {
    "SLURM_JOB_ID": "31",
    "SLURM_JOB_NODELIST": "node[01-02]",
    "SLURM_JOB_CPUS_PER_NODE": "16(x2)",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_TASKS_PER_NODE": "16(x2)",
}
STEP = {
    **BATCH,
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "node[01-02]",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2,3",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MASTER = {"MASTER_ADDR": "head", "MASTER_PORT": "4321"}
TORCHRUN = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


def identity(environment: Environment) -> str:
    found = rank_variables(environment)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return " ".join(found[name] for name in names)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (STEP, f"3 5 1 3 node01 {job_port(31, 2)}"),
        (STEP | MASTER, "3 5 1 3 head 4321"),
        (OPEN_MPI | MASTER, "3 4 1 2 head 4321"),
        (HYDRA | MASTER, "3 4 1 2 head 4321"),
        # mpirun in an allocation starts its daemons with srun, whose variables the ranks inherit.
        (STEP | OPEN_MPI, f"3 4 1 2 node01 {job_port(31, 0)}"),
        (STEP | HYDRA, f"3 4 1 2 node01 {job_port(31, 0)}"),
        # srun --mpi=pmi2 sets Hydra's variables, but not those about the node.
        (STEP | {"PMI_RANK": "3", "PMI_SIZE": "5"}, f"3 5 1 3 node01 {job_port(31, 2)}"),
        (
            OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
            f"3 4 1 4 127.0.0.1 {job_port(os.getppid(), 0)}",
        ),
    ],
)
def test_a_rank_finds_itself_and_rank_0(environment: Environment, expected: str) -> None:
    assert identity(environment) == expected


@pytest.mark.parametrize(
    "environment", [{}, TORCHRUN, TORCHRUN | STEP, BATCH, BATCH | {"SLURM_STEP_NUM_TASKS": "1"}]
)
def test_nothing_is_added_for_torchrun_or_where_no_rank_was_started(environment: Environment) -> None:
    assert rank_variables(environment) == {}


def test_the_nodes_are_known_under_slurm() -> None:
    assert rank_variables(STEP)[NODES] == "node01,node02"


@pytest.mark.parametrize(
    ("environment", "what"),
    [
        (OPEN_MPI, "mpirun does not say where rank 0 is"),
        (HYDRA, "mpiexec does not say where rank 0 is"),
        (STEP | {"SLURM_PROCID": "x"}, "SLURM_PROCID = 'x': expected a number"),
        ({k: v for k, v in STEP.items() if k != "SLURM_LOCALID"}, "SLURM_LOCALID is not set"),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "5"}, "names 2 nodes"),
    ],
)
def test_half_an_environment_is_refused_with_what_is_missing(environment: Environment, what: str) -> None:
    with pytest.raises(ConfigurationError, match=what):
        rank_variables(environment)


def test_a_step_of_one_task_is_where_somebody_types() -> None:
    assert in_step(STEP)
    assert not in_step(BATCH)
    typing = BATCH | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "0"}
    assert not in_step(typing)
    allocation = Allocation.find(typing)
    assert allocation is not None
    assert "--overlap" in allocation.command(1, ["x"])
    assert Allocation.find(typing | {"SLURM_JOB_NODELIST": "node01", "SLURM_JOB_CPUS_PER_NODE": "4"}) is None


@pytest.mark.parametrize("environment", [{}, TORCHRUN, STEP])
def test_only_outside_a_step_there_is_an_allocation_to_fill(environment: Environment) -> None:
    assert Allocation.find(environment) is None


@pytest.mark.parametrize(
    ("more", "processes"),
    [
        ({"NGPU": "3", "SLURM_GPUS_ON_NODE": "8"}, 3),
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_NTASKS": "2"}, 8),
        ({"SLURM_NTASKS": "4"}, 2),
        ({"SLURM_GPUS_ON_NODE": "0", "SLURM_NTASKS": "6"}, 3),
        ({}, 4),
    ],
)
def test_processes_of_each_node(more: Environment, processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.cluster.srun.visible_gpus", lambda: 0)
    loaded = load(["--experimental.pipeline_parallel_degree", "8"])
    allocation = Allocation.find(BATCH)
    assert allocation is not None
    assert allocation.processes(loaded, BATCH | more) == processes
    command = allocation.command(processes, ["python"])
    assert f"--ntasks={2 * processes}" in command
    assert f"--cpus-per-task={16 // processes}" in command
    assert "--overcommit" not in command


def test_more_processes_than_processors_share_them() -> None:
    allocation = Allocation(1, ("a", "b"), (4, 2), within_step=False)
    assert {"--overcommit", "--cpus-per-task=1"} <= set(allocation.command(4, ["python"]))


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"NGPU": "0"}, "NGPU = '0'"),
        ({"SLURM_NTASKS": "3"}, "3 processes on 2 nodes"),
        ({}, "the configured degrees"),
    ],
)
def test_processes_that_are_not_the_same_on_every_node_are_refused(
    more: Environment, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.cluster.srun.visible_gpus", lambda: 0)
    loaded = load(["--experimental.pipeline_parallel_degree", "3"])
    allocation = Allocation.find(BATCH)
    assert allocation is not None
    with pytest.raises(ConfigurationError, match=what):
        allocation.processes(loaded, BATCH | more)


def test_jobs_that_may_share_a_node_meet_at_different_ports() -> None:
    ports = {job_port(job, step) for job in range(5000, 5700) for step in range(16)}
    assert len(ports) == 700 * 16
    assert min(ports) >= 20_000
    assert max(ports) < 32_000
    assert job_port(1, 0, attempt=1) != job_port(1, 0)
