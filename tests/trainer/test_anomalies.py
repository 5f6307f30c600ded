"""Which loss is a spike, and what is remembered of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trainer.anomalies import Anomalies, Policy
from trainer.config.schema import Training
from trainer.errors import TrainingFailed

COUNTERS: dict[str, Any] = {"skipped_in_a_row": 0}


def judge(**keys: Any) -> tuple[Anomalies, dict[str, Any]]:
    counters = dict(COUNTERS)
    settings = {"loss_spike_threshold": 1.5, "loss_spike_window": 4, **keys}
    return Anomalies(Training.model_validate(settings), counters), counters


def policies(anomalies: Anomalies, losses: list[float]) -> list[tuple[Policy, bool]]:
    verdicts = [anomalies.judge(step, loss, 1.0) for step, loss in enumerate(losses, 1)]
    return [(verdict.policy, verdict.spike) for verdict in verdicts]


FINE, NOTED = (Policy.UPDATE, False), (Policy.UPDATE, True)


def test_a_loss_above_the_threshold_times_the_median_of_the_window_is_a_spike() -> None:
    anomalies, _ = judge()
    assert policies(anomalies, [9.0, 2.0, 2.0, 2.0, 3.1, 2.9, 3.0]) == [*[FINE] * 4, NOTED, FINE, FINE]


def test_before_the_window_is_full_no_loss_is_a_spike() -> None:
    anomalies, _ = judge()
    assert policies(anomalies, [1.0, 1.0, 1.0, 100.0]) == [FINE] * 4


def test_a_level_that_stays_is_a_spike_no_more() -> None:
    anomalies, _ = judge()
    assert policies(anomalies, [1.0] * 4 + [5.0] * 4) == [FINE] * 4 + [NOTED] * 3 + [FINE]


def test_without_a_threshold_nothing_is_a_spike_and_nothing_is_remembered() -> None:
    anomalies, counters = judge(loss_spike_threshold=None)
    assert policies(anomalies, [1.0] * 10 + [1e9]) == [FINE] * 11
    assert counters == COUNTERS


def test_skipped_spikes_in_a_row_are_bounded_and_others_begin_anew() -> None:
    anomalies, counters = judge(loss_spike_policy="skip", max_nonfinite_steps=1)
    policies(anomalies, [1.0] * 4 + [9.0, 1.0, 9.0])
    assert counters["skipped_in_a_row"] == 1
    with pytest.raises(TrainingFailed, match=r"2 times in a row; training\.max_nonfinite_steps = 1"):
        anomalies.judge(8, float("nan"), 1.0)


def test_rollbacks_are_bounded_over_the_whole_run() -> None:
    anomalies, counters = judge(loss_spike_policy="rollback", nonfinite_policy="rollback", max_rollbacks=2)
    policies(anomalies, [1.0] * 4 + [9.0, 1.0])
    assert anomalies.judge(7, 1.0, float("inf")).policy is Policy.ROLL_BACK
    assert counters["rollbacks"] == 2
    with pytest.raises(TrainingFailed, match=r"training\.max_rollbacks = 2"):
        anomalies.judge(8, 9.0, 1.0)


def test_stop_says_the_key() -> None:
    anomalies, _ = judge(loss_spike_policy="stop")
    policies(anomalies, [1.0] * 4)
    with pytest.raises(
        TrainingFailed, match=r"step 5: loss 9\.0000, 9\.00 times .* training\.loss_spike_policy = 'stop'"
    ):
        anomalies.judge(5, 9.0, 1.0)


def test_what_is_remembered_survives_a_checkpoint() -> None:
    """Judged in two runs as in one."""
    losses = [3.0, 2.0, 2.5, 2.0, 4.0, 2.0, 3.6, 2.2, 3.9]
    straight = policies(judge()[0], losses)
    first, counters = judge()
    start = policies(first, losses[:5])
    second, restored = judge()
    restored.update(json.loads(json.dumps(counters)))
    assert start + policies(second, losses[5:]) == straight
    assert NOTED in straight
