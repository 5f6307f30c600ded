from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelisms.pipeline.actions import Action
from parallelisms.pipeline.bounds import unsplit_bound
from parallelisms.pipeline.communicate import add_communication
from parallelisms.pipeline.errors import DeadlockError
from parallelisms.pipeline.setting import Costs, Placement, Setting
from parallelisms.pipeline.simulate import simulate
from tests.pipeline.settings import ValidLists, costs, family_named, shared_equally, valid_lists


def parsed(*rows):
    return tuple(tuple(map(Action.parse, row.split())) for row in rows)


def spans(prediction):
    return [[(str(span.action), span.start, span.end) for span in rank] for rank in prediction.spans]


def test_a_timeline_worked_out_by_hand():
    # Stage 0: f 1, B 2 + 1; stage 1: f 3, B 1 + 2.
    costs = Costs((1, 3), (2, 1), (1, 2))
    prediction = simulate(parsed("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), Placement.looped(2, 1), costs)
    assert spans(prediction) == [
        [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 7, 10), ("0B1", 13, 16)],
        [("1F0", 1, 4), ("1B0", 4, 7), ("1F1", 7, 10), ("1B1", 10, 13)],
    ]
    assert prediction.step == 16
    assert prediction.bound == 16
    assert prediction.rank_bubbles == (0.5, 0.0)
    assert prediction.step_bubble == pytest.approx(1 - 20 / 32)
    assert prediction.peak_activations == (2, 1)


def test_weight_gradients_fill_the_wait_for_the_next_gradient():
    costs = Costs.equal(2)
    prediction = simulate(
        parsed("0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1"), Placement.looped(2, 1), costs
    )
    assert spans(prediction)[0] == [
        ("0F0", 0, 1),
        ("0F1", 1, 2),
        ("0I0", 3, 4),
        ("0W0", 4, 5),
        ("0I1", 5, 6),
        ("0W1", 6, 7),
    ]
    assert (prediction.step, prediction.bound) == (7, 7)


def test_transfers_add_to_the_way_but_not_to_the_ranks():
    lists = parsed("0F0 0B0", "1F0 1B0")
    costs = Costs.equal(2, transfer=0.5)
    prediction = simulate(add_communication(lists, Placement.looped(2, 1)), Placement.looped(2, 1), costs)
    assert spans(prediction) == [[("0F0", 0, 1), ("0B0", 5, 7)], [("1F0", 1.5, 2.5), ("1B0", 2.5, 4.5)]]
    assert prediction.step == prediction.bound == 7


def test_messages_of_one_channel_go_one_after_the_other():
    rows = ("0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F0 1RECV_F1 1F0 1F1")
    prediction = simulate(parsed(*rows), Placement.looped(2, 1), Costs.equal(2, transfer=3.0))
    assert spans(prediction)[1] == [("1F0", 4, 5), ("1F1", 7, 8)]


def test_a_transfer_begins_only_when_its_receive_is_posted():
    late = ("0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F0 1F0 1RECV_F1 1F1")
    prediction = simulate(parsed(*late), Placement.looped(2, 1), Costs((1, 4), (1, 1), (1, 1), transfer=1.0))
    assert spans(prediction)[1] == [("1F0", 2, 6), ("1F1", 7, 11)]


def test_neighbours_on_one_rank_need_no_transfer():
    prediction = simulate(parsed("0F0 1F0 1B0 0B0"), Placement((0, 0)), Costs.equal(2, transfer=9.0))
    assert prediction.step == prediction.bound == 6
    assert prediction.step_bubble == 0


def test_the_two_bubbles_differ_by_the_skew_of_start_and_end():
    # GPipe, p = 4, m = 8, f = b = w: per rank the gap between its phases, of the step also the skew.
    setting = Setting(Placement.looped(4, 1), 8, Costs.equal(4))
    prediction = simulate(family_named("GPipe").generate(setting), setting.placement, setting.costs)
    assert prediction.step == unsplit_bound(4, 1, 8) == 33
    assert prediction.step_bubble == pytest.approx(9 / 33)
    assert prediction.rank_bubbles[0] == pytest.approx(9 / 33)
    assert prediction.rank_bubbles[3] == 0


@pytest.mark.parametrize(
    ("name", "each"), [("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2), ("LoopedBFS", 3)]
)
def test_bubbles_are_those_of_the_closed_formula(name, each):
    # (p - 1)(f + B)/v of every rank's time is bubble when m is a multiple of p.
    ranks, microbatches = 4, 12
    placement = Placement.looped(ranks, each)
    setting = Setting(placement, microbatches, shared_equally(placement))
    prediction = simulate(family_named(name).generate(setting), placement, setting.costs)
    assert prediction.step - 3 * microbatches == pytest.approx((ranks - 1) * 3 / each)


def test_lists_that_never_end_are_refused():
    with pytest.raises(DeadlockError, match="rank 0 waits at 0B0 for 1B0 of rank 1"):
        simulate(parsed("0B0 0F0", "1F0 1B0"), Placement.looped(2, 1), Costs.equal(2))


@given(made=valid_lists(), data=st.data())
@settings(max_examples=150, deadline=None)
def test_no_order_on_any_placement_is_shorter_than_the_bound(made: ValidLists, data: st.DataObject):
    chosen = data.draw(costs(made.placement.stages))
    prediction = simulate(add_communication(made.lists, made.placement), made.placement, chosen)
    assert prediction.step >= prediction.bound * (1 - 1e-9)


@given(made=valid_lists(), data=st.data())
@settings(max_examples=80, deadline=None)
def test_communication_that_takes_no_time_changes_nothing(made: ValidLists, data: st.DataObject):
    chosen = replace(data.draw(costs(made.placement.stages)), transfer=0.0)
    complete = add_communication(made.lists, made.placement)
    assert simulate(complete, made.placement, chosen) == simulate(made.lists, made.placement, chosen)


def test_a_wait_for_what_is_in_no_list_is_refused_too():
    with pytest.raises(DeadlockError, match="rank 1 waits at 1F0 for 0F0 of rank 0, which never comes to it"):
        simulate(parsed("0F1", "1F0"), Placement.looped(2, 1), Costs.equal(2))
