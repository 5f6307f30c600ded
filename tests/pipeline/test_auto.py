"""Auto: never longer than the best of the others under the same cap, within every cap, deterministic."""

import itertools
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelisms.pipeline.actions import Kind
from parallelisms.pipeline.errors import DeadlockError, ScheduleError
from parallelisms.pipeline.factory import build_schedule
from parallelisms.pipeline.schedules import auto
from parallelisms.pipeline.schedules.auto import FAMILY
from parallelisms.pipeline.schedules.catalogue import FAMILIES
from parallelisms.pipeline.schedules.operations import Operations
from parallelisms.pipeline.setting import Costs, Placement, Setting
from parallelisms.pipeline.simulate import simulate
from tests.pipeline.settings import costs, shared_equally


def best_of_the_others(setting):
    """The shortest predicted step of every other schedule that exists for the setting and fits its cap."""
    steps = []
    for family in FAMILIES:
        if family is not FAMILY:
            try:
                steps.append(build_schedule(family.name, setting).prediction.step)
            except ScheduleError:
                continue
    return min(steps, default=float("inf"))


@st.composite
def capped_settings(draw, max_ranks, max_microbatches):
    ranks = draw(st.integers(1, max_ranks))
    placement = draw(
        st.sampled_from((Placement.looped(ranks, 1), Placement.looped(ranks, 2), Placement.v_shaped(ranks)))
    )
    times = draw(st.one_of(st.just(shared_equally(placement)), costs(placement.stages)))
    cap = draw(st.sampled_from((None, 1.0, max(1.0, ranks / 3), max(1.0, ranks / 2), float(ranks))))
    return Setting(placement, draw(st.integers(1, max_microbatches)), times, cap)


def check(setting):
    schedule = build_schedule("Auto", setting)  # refuses what exceeds the cap
    assert schedule.prediction.step <= best_of_the_others(setting) * (1 + 1e-6)
    assert schedule.prediction.step >= schedule.prediction.bound * (1 - 1e-9)
    if setting.memory_cap is not None:
        assert max(schedule.proof.peak_share) <= setting.memory_cap + 1e-9


@given(capped_settings(max_ranks=4, max_microbatches=8))
@settings(max_examples=12, deadline=None)
def test_auto_is_never_longer_than_the_best_of_the_others_under_the_same_cap(setting):
    check(setting)


@pytest.mark.slow
@given(capped_settings(max_ranks=8, max_microbatches=24))
@settings(max_examples=60, deadline=None)
def test_auto_is_never_longer_than_the_best_of_the_others_in_larger_settings(setting):
    check(setting)


def orders_of_one_stage(operations, stage):
    """All orders of F, I and W of a stage in which each follows its own cause and microbatches keep theirs."""

    def extend(order, done):
        if len(order) == 3 * operations.microbatches:
            yield list(order)
        for kind in range(3):
            before = operations.microbatches if kind == 0 else done[kind - 1]
            if done[kind] < before:
                number = operations.number(kind, stage, done[kind])
                after = [count + (each == kind) for each, count in enumerate(done)]
                yield from extend([*order, number], after)

    return extend([], [0, 0, 0])


def shortest_of_all(setting):
    """The shortest step of all orders within the cap, one stage per rank, by trying them."""
    operations = Operations.of(setting, setting.memory_cap)
    ranks = [
        [
            order
            for order in orders_of_one_stage(operations, rank)
            if operations.peaks([order])[0] <= operations.capacity[rank]
        ]
        for rank in range(setting.ranks)
    ]
    shortest = float("inf")
    for orders in itertools.product(*ranks):
        try:
            prediction = simulate(operations.actions(orders), setting.placement, setting.costs)
        except DeadlockError:
            continue
        shortest = min(shortest, prediction.step)
    return shortest


@pytest.mark.parametrize(("ranks", "microbatches", "cap"), [(2, 3, None), (2, 3, 2.0), (3, 2, None)])
def test_auto_is_the_shortest_of_all_orders_where_all_can_be_tried(ranks, microbatches, cap):
    chance = random.Random(ranks * microbatches)
    for _ in range(2):
        times = Costs(*(tuple(chance.uniform(0.3, 1.5) for _ in range(ranks)) for _ in range(3)))
        setting = Setting(Placement.looped(ranks, 1), microbatches, times, cap)
        step = build_schedule("Auto", setting).prediction.step
        assert step == pytest.approx(shortest_of_all(setting), rel=1e-5)


@pytest.mark.parametrize("placement", [Placement.looped(3, 1), Placement.looped(3, 4), Placement.v_shaped(3)])
def test_one_microbatch_of_memory_is_enough(placement):
    schedule = build_schedule("Auto", Setting(placement, 4, shared_equally(placement), memory_cap=1.0))
    assert max(schedule.proof.peak_share) == pytest.approx(1.0)


def test_auto_is_strictly_shorter_where_stages_are_uneven_or_memory_is_short():
    placement = Placement.v_shaped(4)
    uneven = (0.5, 0.4, 0.6, 0.5, 0.45, 0.55, 0.5, 0.9)
    for cap in (2.0, 4.0):
        setting = Setting(placement, 8, Costs(uneven, uneven, uneven[::-1]), cap)
        assert build_schedule("Auto", setting).prediction.step < 0.999 * best_of_the_others(setting)


@pytest.mark.parametrize("microbatches", [1, 2, 4, 8, 16])
def test_auto_is_at_the_bound_in_the_memory_of_1f1b_for_equal_stages(microbatches):
    placement = Placement.looped(4, 1)
    schedule = build_schedule("Auto", Setting(placement, microbatches, shared_equally(placement), 4.0))
    assert schedule.prediction.step == pytest.approx(schedule.prediction.bound)


def test_auto_splits_backwards_only_where_it_gains():
    placement = Placement.looped(4, 1)
    schedule = build_schedule("Auto", Setting(placement, 8, shared_equally(placement)))
    whole = [action for actions in schedule.actions for action in actions if action.kind is Kind.BACKWARD]
    assert len(whole) >= 8  # at least the first stage's, which nobody waits for


def test_every_rank_that_searches_finds_the_same_schedule():
    placement = Placement.looped(3, 2)
    uneven = (0.5, 0.7, 0.4, 0.6, 0.5, 0.9)
    setting = Setting(placement, 7, Costs(uneven, uneven, uneven), 2.0)
    assert auto.auto(setting) == auto.auto(setting)


@pytest.mark.slow
@pytest.mark.parametrize("placement", [Placement.looped(8, 1), Placement.looped(8, 2), Placement.v_shaped(8)])
def test_the_search_takes_two_seconds_for_8_ranks_and_32_microbatches(placement):
    forward = tuple(1 + 0.05 * (7 * stage % 5) for stage in range(placement.stages))
    setting = Setting(placement, 32, Costs(forward, forward, forward[::-1]), 4.0)
    start = time.process_time()
    auto.auto(setting)
    assert time.process_time() - start < 4.0  # twice that, for slow machines
