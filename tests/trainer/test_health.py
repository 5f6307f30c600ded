"""The look at all ranks before the first step, and which rank computes longest."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from parallelisms.pipeline.actions import Action, Kind
from parallelisms.pipeline.measured import MeasuredAction, RankTimeline
from tests.distributed.program import pipeline, rows, run, tiny
from tests.distributed.ranks import run_ranks
from trainer import health
from trainer.errors import RankFailed
from trainer.health import RankHealth, check_health, slow_ranks
from trainer.metrics import read_metrics
from trainer.stragglers import compute_seconds, straggler_figures

GOOD = RankHealth("node1", 1e12, 1e9, 1e-4, 0.0)


def test_ranks_that_differ_a_little_are_not_slow() -> None:
    assert slow_ranks([GOOD, RankHealth("node2", 0.8e12, 0.7e9, 1e-4, 0.3), GOOD]) == []


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (RankHealth("node2", 0.5e12, 1e9, 1e-4, 0), "rank 2 on node2 is slow: its device reaches 50%"),
        (
            RankHealth("node2", 1e12, 1e8, 1e-4, 0),
            "rank 2 on node2 is slow: its connection to its neighbours reaches 10%",
        ),
        (RankHealth("node2", 1e12, 1e9, 1e-4, -7.0), "the clock of node2 (rank 2) is 7.0 s behind rank 0's"),
    ],
)
def test_a_rank_that_falls_behind_is_named_with_its_host(bad: RankHealth, said: str) -> None:
    found = slow_ranks([GOOD, GOOD, bad, GOOD])
    assert len(found) == 1
    assert found[0].startswith(said)


def slow_device(rank: int, policy: str) -> str:
    """What rank 1 with a slow device leads to."""
    if rank == 1:
        measured = health._device_speed
        health._device_speed = lambda device: measured(device) / 100  # type: ignore[assignment]
    try:
        return "\n".join(check_health(torch.device("cpu"), policy))
    except RankFailed as error:
        return f"ended: {error}"


@pytest.mark.parametrize("policy", ["warn", "stop"])
def test_all_ranks_agree_on_a_slow_one_and_the_policy_decides(policy: str) -> None:
    said = run_ranks(slow_device, 3, policy)
    assert said[0] == said[1] == said[2]
    assert "rank 1 on" in said[0]
    assert "its device reaches" in said[0]
    assert said[0].startswith("3 ranks on 1 hosts" if policy == "warn" else "ended: ")


def test_the_slowest_rank_is_named_with_the_median() -> None:
    figures = straggler_figures([1.0, 3.0, 1.2, 1.1])
    assert figures == {
        "compute_seconds_median": pytest.approx(1.15),
        "compute_seconds_max": 3.0,
        "slowest_rank": 1,
    }


def test_waits_and_messages_are_not_the_ranks_own_time() -> None:
    forward = Action(0, Kind.FORWARD, 0)
    receive = Action(0, Kind.RECEIVE_ACTIVATION, 0)
    actions = (
        MeasuredAction(receive, 0.0, 5.0),
        MeasuredAction(forward, 5.0, 7.0, wait_start=0.5, wait_end=5.0),
    )
    assert compute_seconds(RankTimeline(actions, 0, "cpu", "clock")) == pytest.approx(2.0)


def _slow_rank(rank: int) -> None:
    if rank == 1:
        forward = torch.nn.functional.rms_norm

        def sleepy(*args: object, **options: object) -> torch.Tensor:
            time.sleep(0.01)
            return forward(*args, **options)

        torch.nn.functional.rms_norm = sleepy


@pytest.mark.slow
def test_the_metrics_name_a_slow_rank_of_a_run_and_training_is_the_same(tmp_path: Path) -> None:
    arguments = tiny(tmp_path, pipeline(2), "--comm.health_check always", steps=2)
    said = run(arguments, world_size=2, before=_slow_rank)
    assert "health      2 ranks on 1 hosts" in said
    assert [row["slowest_rank"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 1]
    plain = tmp_path / "plain"
    run(tiny(plain, pipeline(2), steps=2), world_size=2)
    assert rows(plain) == rows(tmp_path)
