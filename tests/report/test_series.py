"""Values over steps, as they are read, thinned and smoothed; axes."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.report.axis import Axis, step_axis, tick_texts, value_axis
from trainer.report.loose import Loose
from trainer.report.series import Series, series, smoothed, thinned

_VALUE = st.none() | st.floats(-1e6, 1e6)
_SERIES = st.lists(_VALUE, max_size=300).map(
    lambda values: Series(tuple(range(1, len(values) + 1)), tuple(values))
)


def _rows(*rows: dict[str, Any]) -> list[Loose]:
    return [Loose(each) for each in rows]


def test_rows_become_values_in_the_order_of_the_steps_and_the_last_of_a_step_counts() -> None:
    rows = _rows(
        {"step": 3, "loss": 1.0},
        {"step": 1, "loss": 9},
        {"step": 2, "validation_loss": 5.0},
        {"step": 3, "loss": None},
    )
    assert series(rows, "loss") == Series((1, 3), (9.0, None))
    assert series(rows, "validation_loss") == Series((2,), (5.0,))


@pytest.mark.parametrize("step", [None, "1", True, 1.5, [1], 2**60, float("nan")])
def test_a_row_whose_step_is_no_step_is_left_out(step: Any) -> None:
    assert series(_rows({"step": step, "loss": 1.0}), "loss") == Series()


@pytest.mark.parametrize("value", ["1", True, [1], {}, float("inf"), float("nan"), 10**400])
def test_a_value_that_is_no_finite_number_is_a_gap(value: Any) -> None:
    assert series(_rows({"step": 1, "loss": value}), "loss") == Series((1,), (None,))


@given(_SERIES, st.integers(10, 100))
def test_thinning_keeps_ends_extremes_and_gaps_and_adds_nothing(data: Series, most: int) -> None:
    thin = thinned(data, most)
    assert len(thin.steps) <= max(most + 2, 2)
    points = dict(zip(data.steps, data.values, strict=True))
    assert all(points[step] == value for step, value in zip(thin.steps, thin.values, strict=True))
    assert list(thin.steps) == sorted(set(thin.steps))
    if data.known:
        values = [value for _, value in data.known]
        assert {min(values), max(values)} <= {value for _, value in thin.known}
    if data.steps:
        assert (thin.steps[0], thin.steps[-1]) == (data.steps[0], data.steps[-1])


@given(_SERIES, st.integers(0, 20).map(lambda half: 2 * half + 1))
def test_smoothing_takes_the_median_of_as_many_values_on_both_sides(data: Series, width: int) -> None:
    expected = []
    for index, value in enumerate(data.values):
        reach = min(width // 2, index, len(data.values) - 1 - index)
        window = [v for v in data.values[index - reach : index + reach + 1] if v is not None]
        expected.append(None if value is None else median(window))
    assert smoothed(data, width) == Series(data.steps, tuple(expected))


def test_the_median_leaves_out_the_first_step_that_warms_everything_up() -> None:
    assert Series((1, 2, 3, 4), (100.0, 1.0, None, 3.0)).median() == 2.0
    assert Series((1,), (7.0,)).median() == 7.0
    assert Series().median() is None


@given(st.lists(st.floats(-1e9, 1e9), max_size=50), st.booleans())
def test_an_axis_of_values_is_never_empty_and_its_ticks_lie_on_it(values: list[float], zero: bool) -> None:
    axis = value_axis(values, from_zero=zero)
    assert axis.low < axis.high
    ticks = axis.ticks(5)
    assert 1 <= len(ticks) <= 6
    slack = 1e-5 * (axis.high - axis.low)
    assert all(axis.low - slack <= tick <= axis.high + slack for tick in ticks)
    assert len(tick_texts(ticks)) == len(ticks)


@given(st.floats(-1e5, 1e5), st.floats(1e-3, 1e7))
def test_the_texts_of_ticks_differ(low: float, length: float) -> None:
    texts = tick_texts(Axis(low, low + length).ticks(5))
    assert len(set(texts)) == len(texts)


def test_a_single_value_very_far_away_does_not_stretch_the_axis() -> None:
    values = [1 + index / 100 for index in range(100)]
    assert value_axis([*values, 500.0], from_zero=False).high < 3
    # But values that are only spread are all shown.
    assert value_axis([*values, 4.0], from_zero=False).high > 4


def test_few_values_are_all_shown() -> None:
    axis = value_axis([1.0, 1000.0], from_zero=False)
    assert axis.low <= 1
    assert axis.high >= 1000


def test_ticks_of_steps_are_whole() -> None:
    assert step_axis([1, 2, 3]).ticks(6) == [1, 2, 3]
    assert step_axis([5]).ticks(6) == [4, 5, 6]


@pytest.mark.parametrize(
    ("ticks", "texts"),
    [
        ([0.0, 0.002, 0.004], ["0", "0.002", "0.004"]),
        ([0.0, 2e-5, 4e-5], ["0", "2e-5", "4e-5"]),
        ([5.0, 5.5, 6.0], ["5.0", "5.5", "6.0"]),
        ([0.0, 1000.0, 2000.0], ["0", "1,000", "2,000"]),
        ([0.0, 20000.0], ["0", "20k"]),
        ([0.0, 500000.0, 1000000.0], ["0", "0.5M", "1M"]),
        ([-1.0, 0.0, 1.0], ["-1", "0", "1"]),
    ],
)
def test_ticks_are_written_as_a_reader_expects(ticks: list[float], texts: list[str]) -> None:
    assert tick_texts(ticks) == texts
