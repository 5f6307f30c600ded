from dataclasses import replace

import pytest

from parallelisms.pipeline.advice import advise
from parallelisms.pipeline.assemble import assemble
from parallelisms.pipeline.comparison import Cause, compare
from parallelisms.pipeline.costs import costs_of, exposed_transfers, measured_costs
from parallelisms.pipeline.figures import measured_figures
from parallelisms.pipeline.setting import Costs
from tests.pipeline.synthetic import every_action, measured, report, schedule_of

# Costs and figures


def test_measured_costs_are_those_that_the_stages_had():
    costs = Costs((1.0, 2.0, 3.0), (2.0, 1.0, 2.0), (1.0, 1.0, 4.0), 0.5)
    schedule = schedule_of("ZB-H1", 3, 7)
    found = measured_costs(measured(schedule, costs))
    assert found.forward == pytest.approx(costs.forward)
    assert found.backward_input == pytest.approx(costs.backward_input)
    assert found.backward_weight == pytest.approx(costs.backward_weight)
    assert found.transfer == pytest.approx(0.5)


def test_a_backward_in_one_go_is_shared_by_halves():
    found = measured_costs(measured(schedule_of("1F1B", 2, 3), Costs((1, 1), (1, 2), (3, 2))))
    assert found.backward_input == (2, 2)
    assert found.backward_weight == (2, 2)


def test_one_slow_microbatch_does_not_change_the_costs():
    found = measured_costs(measured(schedule_of("1F1B", 2, 5), delays={"1F2": 30.0}))
    assert found.forward == pytest.approx((1.0, 1.0))


def test_what_the_host_needs_between_two_actions_is_part_of_their_cost():
    # One rank goes F0 B0 F1 B1 ...: the pause is after each backward but the last.
    timeline = measured(schedule_of("1F1B", 1, 4), pauses={f"0F{m}": 0.5 for m in range(1, 4)})
    found = measured_costs(timeline)
    assert found.forward == (1.0,)
    assert found.backward_input[0] + found.backward_weight[0] == pytest.approx((3 * 2.5 + 2.0) / 4)
    assert timeline.schedule.simulate(found).step == pytest.approx(measured_figures(timeline, 0).step)


def test_the_plan_is_scaled_by_what_most_actions_took():
    schedule = schedule_of("1F1B", 4, 8)  # in units; measured in seconds
    costs = Costs((0.01, 0.01, 0.05, 0.01), (0.01,) * 4, (0.01,) * 4)
    timeline = measured(schedule, costs)
    reports = [report(rank.rank, rank.actions, 0, measured_ns=0) for rank in timeline.ranks]
    assembled = assemble(1, reports, schedule)
    assert assembled.plan_costs.forward == pytest.approx((0.01,) * 4)
    assert assembled.plan().step == pytest.approx(0.33)


@pytest.mark.parametrize("transfer", [0.0, 0.25])
def test_the_costs_of_a_prediction_are_found_again(transfer):
    schedule = schedule_of("ZBVZeroBubble", 4, 8, transfer=transfer)
    found = costs_of(schedule.prediction, schedule.placement)
    assert found == Costs.equal(8, 0.5, 0.5, 0.5, transfer)


def test_figures_of_what_was_measured_as_planned_are_those_of_the_plan():
    schedule = schedule_of("1F1B", 4, 8)
    figures = measured_figures(measured(schedule), 0)
    assert figures.step == pytest.approx(33)
    assert figures.bound == pytest.approx(33)
    assert figures.step_bubble == pytest.approx(schedule.prediction.step_bubble)
    assert figures.rank_bubbles == pytest.approx(schedule.prediction.rank_bubbles)
    assert figures.peak_activations == schedule.prediction.peak_activations
    assert sum(figures.exposed) == 0


def test_exposed_communication_is_what_is_waited_for_after_a_message_was_made():
    timeline = measured(schedule_of("1F1B", 2, 1), Costs.equal(2, transfer=0.25))
    found = exposed_transfers(timeline, timeline.pipeline(0))
    assert [(str(each.action), each.seconds, each.whole) for each in found] == [
        ("0B0", 0.25, True),
        ("1F0", 0.25, True),
    ]
    assert measured_figures(timeline, 0).exposed == (0.25, 0.25)


# What differs from the plan


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_nothing_is_late_when_everything_went_as_planned(name):
    comparison = compare(measured(schedule_of(name, 4, 6, unit=0.02)))
    assert comparison.late == ()
    assert comparison.measured_step == pytest.approx(comparison.planned_step)
    assert all(each.ratio == pytest.approx(1.0) for each in comparison.stages)


def test_a_slow_stage_is_found_and_the_waiting_it_causes_is_traced_to_it():
    schedule = schedule_of("1F1B", 4, 8, unit=0.01)
    costs = Costs((0.01, 0.01, 0.02, 0.01), (0.01,) * 4, (0.01,) * 4)
    comparison = compare(measured(schedule, costs))
    first = comparison.groups()[0]
    assert [str(each.action) for each in first.actions] == [f"2F{m}" for m in range(8)]
    assert {each.cause for each in first.actions} == {Cause.SLOW_STAGE}
    assert first.lost == pytest.approx(0.08)
    others = [each for each in comparison.late if each.rank != 2]
    assert others
    for each in others:
        assert each.cause is Cause.LATE_RECEIVE
        assert each.origin is not None
        assert (each.origin.stage, each.origin_rank) == (2, 2)
    slow = max(comparison.stages, key=lambda each: each.ratio)
    assert (slow.stage, slow.kind.value, slow.ratio) == (2, "F", pytest.approx(2.0))


def test_an_action_that_was_slow_once_is_told_from_a_slow_stage():
    comparison = compare(measured(schedule_of("1F1B", 4, 8, unit=0.01), delays={"1B3": 0.04}))
    worst = comparison.groups()[0].actions[0]
    assert (str(worst.action), worst.cause, worst.lost) == ("1B3", Cause.SLOW_ONCE, pytest.approx(0.04))
    assert set(comparison.lost_by_cause()) == {Cause.SLOW_ONCE, Cause.LATE_RECEIVE}


def test_a_rank_that_had_its_input_and_did_not_begin_is_host_bound():
    comparison = compare(measured(schedule_of("1F1B", 2, 4, unit=0.01), pauses={"0F1": 0.03}))
    worst = comparison.groups()[0].actions[0]
    assert (str(worst.action), worst.cause, worst.lost) == ("0F1", Cause.HOST_BOUND, pytest.approx(0.03))


def test_a_message_that_was_long_on_its_way_is_no_fault_of_its_sender():
    schedule = schedule_of("1F1B", 2, 1, unit=0.01)
    comparison = compare(measured(schedule, Costs.equal(2, 0.01, 0.01, 0.01, transfer=0.02)))
    assert {str(each.action): each.cause for each in comparison.late} == {
        "1F0": Cause.SLOW_TRANSFER,
        "0B0": Cause.SLOW_TRANSFER,
    }


def test_what_the_clocks_cannot_tell_is_not_called_late():
    timeline = measured(schedule_of("1F1B", 2, 4, unit=0.01), pauses={"0F1": 0.003})
    assert compare(timeline).late
    assert not compare(replace(timeline, clock_bound=0.002)).late


def test_a_pipeline_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="no pipeline 7; there are 0"):
        compare(measured(schedule_of("1F1B", 2, 2)), 7)


def test_the_fastest_schedule_for_the_measured_costs_is_named_with_its_gain():
    advice = advise(measured(schedule_of("1F1B", 4, 8, unit=0.01)))
    assert advice.current.name == "1F1B"
    assert advice.current.step == pytest.approx(0.33)
    # 27 against 33, with the same memory: the bound of one stage per rank.
    assert advice.best.step == pytest.approx(0.27)
    assert advice.best.peak_share <= 4
    assert advice.gain(advice.best) == pytest.approx(6 / 33)
    assert advice.fastest.step <= advice.best.step
    assert advice.auto is not None
    assert advice.auto.step <= advice.best_named.step


def test_advice_keeps_the_stages_as_they_are():
    advice = advise(measured(schedule_of("Interleaved1F1B", 4, 8, unit=0.01)))
    assert {each.placement.stages for each in advice.others} == {8}
    assert {each.name for each in advice.others} >= {"LoopedBFS", "ZBVZeroBubble"}
    assert "1F1B" not in {each.name for each in advice.others}


def test_times_of_all_actions_shift_together():
    timeline = measured(schedule_of("1F1B", 2, 2))
    moved = every_action(timeline, lambda each: each.shifted(5.0))
    for rank, before in zip(moved.ranks, timeline.ranks, strict=True):
        for after, original in zip(rank.actions, before.actions, strict=True):
            assert after.start == original.start + 5
            assert after.waited == pytest.approx(original.waited)
