"""`[job] time_limit`: how it is written, and when a step must be the last one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from trainer.config.schema import Config
from trainer.time_limit import STARTED, TimeLimit


class Clock:
    """A clock that stands still unless it is told."""

    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


def steps_made(
    limit: float, step: Callable[[int], float], save: Callable[[int], float], every: int, guess: float
) -> tuple[int, float]:
    """Steps until the limit says stop, and the time left after the last save."""
    clock = Clock()
    began, slowest = clock.now, 0.0
    asked = TimeLimit(limit, guess, clock)
    for number in range(1, 100_000):
        clock.now += step(number)
        stops = asked.reached()
        if stops or number % every == 0:
            clock.now += save(number)
            slowest = max(slowest, save(number))
        asked.saved(slowest, save(number) if number % every == 0 else 0.0)
        if stops:
            return number, limit - (clock.now - began)
    raise AssertionError("never")


@given(
    step=st.floats(1, 30),
    save=st.floats(0, 60),
    every=st.integers(1, 50),
    noise=st.floats(0, 1),
    limit=st.floats(600, 5_000),
)
@settings(max_examples=50, deadline=None)
def test_the_state_is_saved_before_time_is_up_and_little_time_is_given_away(
    step: float, save: float, every: int, noise: float, limit: float
) -> None:
    """Steps of up to twice the usual time, saves as slow as any before."""
    made, left = steps_made(
        limit, lambda n: step * (1 + noise * (n % 3) / 2), lambda n: save, every, guess=save
    )
    assert left >= 0
    assert left <= 2 * (step * 2 + save) + 10 + step or made == 1


def test_the_first_save_is_thought_to_take_what_the_plan_says() -> None:
    assert steps_made(100, lambda n: 1.0, lambda n: 20.0, 1000, guess=20.0) == (50, 30.0)


def test_without_a_limit_no_step_is_the_last() -> None:
    clock = Clock()
    limit = TimeLimit(None, 1e9, clock)
    clock.now += 1e9
    assert not limit.reached()


def test_a_job_that_was_started_again_has_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setenv(STARTED, str(int(clock.now) - 3500))
    limit = TimeLimit(3600, 1.0, clock)
    assert not limit.reached()
    clock.now += 89
    assert limit.reached()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2:00:00", 7200), ("0:00:30", 30), ("100:00:00", 360_000), ("1-12:00:00", 129_600), (90, 90)],
)
def test_a_duration_is_a_time_or_a_number_of_seconds(text: str | int, seconds: int) -> None:
    assert Config.model_validate({"job": {"time_limit": text}}).job.time_limit == seconds


@pytest.mark.parametrize("text", ["2:00", "120", "2h", "1:60:00", "-1:00:00", 0, -5, 1.5, True, "0:00:00"])
def test_what_may_be_minutes_or_hours_is_refused_like_any_nonsense(text: object) -> None:
    with pytest.raises(ValidationError):
        Config.model_validate({"job": {"time_limit": text}})
