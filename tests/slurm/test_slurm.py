"""Jobs of a real SLURM, on one machine with three nodes: they end where an uninterrupted run ends, whatever happens.

Skipped, with the reason, where SLURM is not installed and cannot be. The jobs of the first tests run side by side.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.distributed.program import pipeline, rows, run, tiny
from trainer.cluster.node_list import expand_nodes

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("cluster.sh")
NODES = 3
STEPS = 120
LONG = 400  # for what comes by SLURM's coarse clock
OVER = re.compile(r"JobState=(COMPLETED|FAILED|TIMEOUT|CANCELLED|NODE_FAIL)")


@dataclass(frozen=True)
class Cluster:
    """SLURM's commands, with the environment in which they find this cluster."""

    environment: dict[str, str]

    def call(self, *command: str) -> str:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, env=self.environment, cwd=ROOT
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout.strip()

    def node(self, what: str, number: int) -> None:
        """`crash` or `boot` a node."""
        subprocess.run(["bash", SCRIPT, what, str(number)], check=True, env=self.environment, timeout=60)

    def state(self, job: str) -> str:
        """What scontrol says about a job, in one line."""
        return self.call("scontrol", "show", "job", "--oneliner", job)

    def starts(self, job: str) -> int:
        """How often the job has been started again."""
        found = re.search(r"Restarts=(\d+)", self.state(job))
        assert found is not None
        return int(found[1])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if os.geteuid() != 0:
        pytest.skip("a SLURM of our own needs root")
    if subprocess.run(["bash", SCRIPT, "install"], capture_output=True, timeout=400, check=False).returncode:
        pytest.skip("SLURM is not installed, and apt-get cannot install it")
    # There can be only one: its nodes have fixed names and addresses. Munge's socket needs a short path.
    folder = Path("/tmp/stageline-slurm")
    with Path("/tmp/stageline-slurm.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        environment = {
            **inherited,
            "SLURM_TEST_DIR": str(folder),
            "SLURM_TEST_NODES": str(NODES),
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin",
            "VIRTUAL_ENV": sys.prefix,
            "PYTHONPATH": str(ROOT),
        }
        started = subprocess.run(
            ["bash", SCRIPT, "start"],
            capture_output=True,
            text=True,
            timeout=120,
            env=environment,
            check=False,
        )
        try:
            if started.returncode:
                pytest.skip(f"SLURM does not start here: {started.stderr[-300:]}")
            yield Cluster(environment)
        finally:
            subprocess.run(
                ["bash", SCRIPT, "stop"], capture_output=True, timeout=120, env=environment, check=False
            )
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Job:
    """A job that trains in `folder`: four ranks on two nodes, as pipeline and data parallelism."""

    cluster: Cluster
    number: str
    folder: Path

    def wait_for(self, condition: Callable[[], bool], what: str, seconds: float = 90.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, (
                f"no {what} in {seconds} s: {self.cluster.state(self.number)}\n{self.said}"
            )
            time.sleep(0.2)

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: self.step >= step, f"step {step}")

    def wait_for_restart(self, times: int, seconds: float = 90.0) -> None:
        there = re.compile(f"JobState=RUNNING|{OVER.pattern}")
        self.wait_for(
            lambda: (
                self.cluster.starts(self.number) >= times
                and there.search(self.cluster.state(self.number)) is not None
            ),
            f"restart {times}",
            seconds,
        )

    def end(self, seconds: float = 150.0) -> str:
        """SLURM's word for how it ended, e.g. COMPLETED."""
        self.wait_for(lambda: OVER.search(self.cluster.state(self.number)) is not None, "end", seconds)
        found = OVER.search(self.cluster.state(self.number))
        assert found is not None
        return found[1]

    @property
    def step(self) -> int:
        path = self.folder / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    @property
    def said(self) -> str:
        return "".join(path.read_text() for path in self.folder.glob("slurm*.out"))


def training(folder: Path, steps: int = STEPS) -> list[str]:
    checkpoints = "--checkpoint.enable_checkpoint true --checkpoint.interval 20 --checkpoint.keep_latest_k 2"
    return tiny(folder, checkpoints, "--lr_scheduler.min_lr_factor 1.0", pipeline(2), steps=steps)


def submit(cluster: Cluster, folder: Path, *options: str, steps: int = STEPS) -> Job:
    """By sbatch of the batch script itself."""
    number = cluster.call(
        *("sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=2", "--mem=4000"),
        *(f"--output={folder}/slurm.out", *options, "slurm/train.sbatch", *training(folder, steps)),
    )
    return Job(cluster, number, folder)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """The metrics of the run that nothing interrupts; the rate is constant, so a shorter one is its beginning."""
    folder = tmp_path_factory.mktemp("straight")
    run(training(folder, LONG), world_size=4)
    return rows(folder)


def test_signals_the_time_limit_and_requeues_lead_to_the_uninterrupted_run(
    cluster: Cluster, expected: list[dict[str, object]], tmp_path: Path
) -> None:
    """Two jobs at once: one is stopped by a signal and then requeued, the other comes near its time limit."""
    signalled = submit(cluster, tmp_path / "signalled")
    limited = submit(cluster, tmp_path / "limited", "--time=1", "--signal=USR1@55", steps=LONG)
    signalled.wait_for_step(10)
    cluster.call("scancel", "--signal=USR1", signalled.number)
    signalled.wait_for_restart(1)
    saved = signalled.step
    signalled.wait_for_step(saved + 10)
    cluster.call("scontrol", "requeue", signalled.number)
    signalled.wait_for_restart(2)
    # Once is enough: a slow machine could spend the minute on starting, again and again.
    limited.wait_for_restart(1, 120)
    cluster.call("scontrol", "update", f"JobId={limited.number}", "TimeLimit=60")
    assert signalled.end() == "COMPLETED", signalled.said
    assert rows(signalled.folder) == expected[:STEPS]
    assert f"by SIGUSR1 after step {saved}" in signalled.said
    assert f"resumed     after step {saved}" in signalled.said
    assert signalled.said.count("resumed ") == 2
    assert limited.end() == "COMPLETED", limited.said
    assert "by SIGUSR1" in limited.said
    assert rows(limited.folder) == expected


def test_when_a_node_goes_down_the_job_goes_on_without_it(
    cluster: Cluster, expected: list[dict[str, object]], tmp_path: Path
) -> None:
    job = submit(cluster, tmp_path / "crashed")
    job.wait_for_step(25)
    nodes = re.search(r" NodeList=(\S+)", cluster.state(job.number))
    assert nodes is not None
    lost = expand_nodes(nodes[1])[-1]
    cluster.node("crash", int(lost.removeprefix("node")))
    try:
        job.wait_for(lambda: job.said.count("resumed ") == 1, "resumed run", 150)
        job.wait_for(lambda: len(rows(job.folder)) == STEPS, "last step")
    finally:
        cluster.node("boot", int(lost.removeprefix("node")))
    assert rows(job.folder) == expected[:STEPS]
    assert lost not in expand_nodes(cluster.call("squeue", "-h", "-o", "%N", "-t", "R") or "none")


def test_lists_of_nodes_mean_what_scontrol_says(cluster: Cluster) -> None:
    """Of those that this release of it reads: none with text after a bracket."""
    for text in ("node[01-03,07],gpu-a[1,3]", "r[1-2]n[08-10]", "a,b2,c[9-11]", "n[098-101]"):
        assert expand_nodes(text) == tuple(cluster.call("scontrol", "show", "hostnames", text).split())


def test_submit_checks_the_plan_and_then_submits(cluster: Cluster, tmp_path: Path) -> None:
    """A plan that does not fit the nodes is refused before SLURM hears of it."""
    command = ["-m", "trainer.commands.main", "submit", "--nodes", "3", "--processes-per-node", "1"]
    folder = tmp_path / "submitted"
    refused = subprocess.run(
        [sys.executable, *command, *training(folder)],
        capture_output=True,
        text=True,
        env=cluster.environment,
        cwd=ROOT,
    )
    assert refused.returncode == 2
    assert "3" in refused.stderr
    command[4] = "2"
    said = cluster.call(sys.executable, *command, "--sbatch=--mem=2000", *training(folder))
    found = re.search(r"submitted +job (\d+)", said)
    assert found is not None
    assert "JobState=" in cluster.state(found[1])
    cluster.call("scancel", found[1])


def test_an_array_trains_the_runs_of_a_study(cluster: Cluster, tmp_path: Path) -> None:
    study, folder = tmp_path / "study.toml", tmp_path / "runs"
    study.write_text(
        f'[job]\ndump_folder = "{folder}"\n[sweep.grid]\noptimizer.lr = [1e-3, 3e-4]\ntraining.seed = [1, 2]\n'
    )
    arguments = tiny(tmp_path, steps=3)
    at = arguments.index("--job.dump_folder")
    command = [sys.executable, "-m", "trainer.commands.main", "submit", "--config", str(study), "--array"]
    options = ["--processes-per-node", "1", "--sbatch=--mem=1000", *arguments[:at], *arguments[at + 2 :]]
    said = cluster.call(*command, *options)
    found = re.search(r"submitted +job (\d+)", said)
    assert found is not None
    Job(cluster, found[1], folder).wait_for(lambda: not cluster.call("squeue", "-h"), "end of the array", 150)
    runs = sorted(path.parent for path in folder.glob("*/metrics.jsonl"))
    assert [path.name for path in runs] == [
        f"lr={lr},seed={seed}" for lr in ("0.0003", "0.001") for seed in (1, 2)
    ]
    assert [len(rows(path)) for path in runs] == [3] * 4
