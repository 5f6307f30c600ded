"""The engines below V-Half, V-Min and Auto: the greedy scheduler, closing up, joining backwards."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelisms.pipeline.actions import Action, Kind
from parallelisms.pipeline.communicate import add_communication
from parallelisms.pipeline.schedules.justification import close_up, justify
from parallelisms.pipeline.schedules.list_scheduling import Rules, list_schedule
from parallelisms.pipeline.schedules.one_f_one_b import one_f_one_b
from parallelisms.pipeline.schedules.operations import Operations, join_backwards, timed
from parallelisms.pipeline.setting import Costs, Placement, Setting
from parallelisms.pipeline.simulate import simulate
from parallelisms.pipeline.verify import verify
from tests.pipeline.settings import costs


@st.composite
def problems(draw):
    """Operations of any placement, uneven ranks included, with a cap, and rules with random priorities."""
    ranks = draw(st.integers(1, 6))
    placement = draw(
        st.sampled_from(
            (
                Placement.looped(ranks, 1),
                Placement.looped(ranks, 3),
                Placement.v_shaped(ranks),
                Placement((*range(ranks), *range(ranks), 0)),
            )
        )
    )
    setting = Setting(placement, draw(st.integers(1, 9)), draw(costs(placement.stages)))
    operations = Operations.of(setting, draw(st.sampled_from((None, 1.0, 1.5, 2.0, 3.0))))
    chance = random.Random(draw(st.integers(0, 1000)))
    priority = [chance.randrange(1000) for _ in range(operations.count)]
    pace = draw(st.sampled_from((0, 300_000, 5_000_000)))
    return operations, Rules(priority, draw(st.sampled_from((0.0, 0.5, 1.0))), pace)


def proof_of(operations, lists):
    setting = operations.setting
    return verify(
        add_communication(lists, setting.placement), setting.placement, setting.microbatches, sharded=False
    )


@given(problems())
@settings(max_examples=60, deadline=None)
def test_greedy_schedules_complete_within_the_cap_whatever_the_priorities(problem):
    operations, rules = problem
    schedule = list_schedule(operations, rules)
    proof = proof_of(operations, operations.actions(operations.orders(schedule.starts)))
    held = zip(proof.peak_activations, operations.capacity, strict=True)
    assert all(peak <= most for peak, most in held)


@given(problems())
@settings(max_examples=60, deadline=None)
def test_closing_up_never_makes_a_step_longer_nor_takes_more_memory(problem):
    operations, rules = problem
    before = list_schedule(operations, rules)
    orders = operations.orders(before.starts)
    assert timed(operations, orders, operations.durations).step <= before.step
    after = justify(operations, before, operations.durations)
    assert after.step <= before.step
    assert operations.fits(operations.orders(after.starts))
    proof_of(operations, operations.actions(operations.orders(after.starts)))


@given(problems())
@settings(max_examples=60, deadline=None)
def test_joining_backwards_does_not_change_the_step(problem):
    operations, rules = problem
    operations = replace(operations, setting=replace(operations.setting, costs=_without_transfer(operations)))
    schedule = justify(operations, list_schedule(operations, rules), operations.durations)
    lists = join_backwards(operations, schedule)
    placement, times = operations.setting.placement, operations.setting.costs
    assert simulate(lists, placement, times).step == pytest.approx(schedule.step * operations.unit, rel=1e-4)
    proof_of(operations, lists)


def _without_transfer(operations):
    return replace(operations.setting.costs, transfer=0.0)


def test_backwards_are_joined_on_the_first_stage_and_split_where_the_stage_before_waits():
    placement = Placement.looped(2, 1)
    setting = Setting(placement, 1, Costs.equal(2))
    closed = close_up(setting, one_f_one_b(setting))
    assert [str(action) for action in closed[0]] == ["0F0", "0B0"]
    assert [str(action) for action in closed[1]] == ["1F0", "1I0", "1W0"]


def test_closing_up_1f1b_gives_a_step_at_the_split_bound_in_the_memory_of_1f1b():
    placement = Placement.looped(4, 1)
    setting = Setting(placement, 8, Costs.equal(4))
    lists = close_up(setting, one_f_one_b(setting))
    prediction = simulate(lists, placement, setting.costs)
    assert prediction.step == pytest.approx(prediction.bound) == pytest.approx(27.0)
    assert max(prediction.peak_activations) == 4


def test_whole_backwards_are_numbered_as_their_two_halves():
    operations = Operations.of(Setting(Placement.looped(1, 2), 3, Costs.equal(2)))
    lists = ((Action(1, Kind.BACKWARD, 2),),)
    assert operations.actions(operations.numbered(lists)) == (
        (Action(1, Kind.BACKWARD_INPUT, 2), Action(1, Kind.BACKWARD_WEIGHT, 2)),
    )


def test_the_cap_is_rounded_down_to_whole_activations_and_never_below_one_share():
    setting = Setting(Placement.looped(2, 3), 9, Costs.equal(6))
    assert Operations.of(setting, 1.5).capacity == (4, 4)
    assert Operations.of(setting, 0.2).capacity == (3, 3)
    assert Operations.of(setting, 100).capacity == Operations.of(setting).capacity == (27, 27)
