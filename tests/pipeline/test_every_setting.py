"""What holds for every schedule in every setting."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelisms.pipeline.communicate import add_communication, compute_only
from parallelisms.pipeline.factory import build_schedule
from parallelisms.pipeline.schedules.catalogue import FAMILIES
from parallelisms.pipeline.schedules.forward_only import forward_only
from parallelisms.pipeline.setting import Costs, Placement, Setting
from parallelisms.pipeline.simulate import simulate
from parallelisms.pipeline.verify import verify
from tests.pipeline.brute_force import run_on_symbols
from tests.pipeline.settings import Case, cases, family_named, stage_counts


@given(case=cases(), sharded=st.booleans())
@settings(max_examples=150, deadline=None)
def test_every_schedule_verifies_and_computes_the_right_gradients(case: Case, sharded: bool):
    setting = case.setting
    schedule = build_schedule(case.family.name, setting, sharded=sharded)
    held = run_on_symbols(schedule.actions, setting.placement, setting.microbatches, sharded)
    assert tuple(held) == schedule.proof.peak_activations == schedule.prediction.peak_activations
    assert schedule.prediction.step >= schedule.prediction.bound * (1 - 1e-9)
    assert max(schedule.proof.peak_share) <= setting.microbatches + 1e-9


@given(case=cases(), sharded=st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_schedule_validates_with_forwards_alone(case: Case, sharded: bool):
    schedule = build_schedule(case.family.name, case.setting, sharded=sharded, forward_only=True)
    assert {action.kind.value for action in compute_only(schedule.actions)[0]} == {"F"}
    assert schedule.proof.peak_activations == (0,) * case.setting.ranks
    assert schedule.prediction.step >= schedule.prediction.bound * (1 - 1e-9)


@given(
    ranks=st.integers(1, 8), each=st.integers(1, 4), microbatches=st.integers(1, 24), v_shaped=st.booleans()
)
@settings(max_examples=80, deadline=None)
def test_validation_is_exactly_at_the_bound_for_equal_stages(ranks, each, microbatches, v_shaped):
    placement = Placement.v_shaped(ranks) if v_shaped else Placement.looped(ranks, each)
    setting = Setting(placement, microbatches, Costs.equal(placement.stages))
    lists = add_communication(forward_only(setting), placement)
    verify(lists, placement, microbatches, forward_only=True)
    prediction = simulate(lists, placement, setting.costs)
    assert prediction.step == pytest.approx(prediction.bound)


@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_every_schedule_takes_one_rank_and_one_microbatch(name):
    family = family_named(name)
    for each in stage_counts(family):
        placement = family.place(1, each)
        schedule = build_schedule(name, Setting(placement, 1, Costs.equal(placement.stages)))
        assert schedule.proof.messages == 0
        assert schedule.prediction.step_bubble == pytest.approx(0.0)


@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_a_schedule_is_a_pure_function_of_its_setting(name):
    family = family_named(name)
    placement = family.place(3)
    costs = Costs(*((1.0 + 0.1 * k,) * placement.stages for k in range(3)))
    assert family.generate(Setting(placement, 5, costs)) == family.generate(Setting(placement, 5, costs))
