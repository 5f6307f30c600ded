from collections import defaultdict

import pytest
from hypothesis import given, settings

from parallelisms.pipeline.actions import Action, Kind
from parallelisms.pipeline.communicate import Channel, Payload, add_communication, channel_of, compute_only
from parallelisms.pipeline.setting import Costs, Placement, Setting
from tests.pipeline.settings import Case, cases, family_named


def text(actions):
    return " ".join(map(str, actions))


def parsed(*rows):
    return tuple(tuple(map(Action.parse, row.split())) for row in rows)


def test_sends_follow_their_compute_action_and_receives_precede_the_one_before_their_consumer():
    lists = add_communication(parsed("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), Placement.looped(2, 1))
    assert text(lists[0]) == "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1"
    assert text(lists[1]) == "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1"


def test_neighbours_on_one_rank_hand_over_without_messages():
    lists = parsed("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0")
    assert text(add_communication(lists, Placement.v_shaped(2))[1]) == (
        "1RECV_F0 1F0 2RECV_B0 2F0 2SEND_F0 2B0 1B0 1SEND_B0"
    )
    assert add_communication(parsed("0F0 1F0 1B0 0B0"), Placement((0, 0))) == parsed("0F0 1F0 1B0 0B0")


def test_receives_keep_the_senders_order_when_the_receiver_uses_them_in_another():
    lists = parsed("0F0 0F1 0B1 0B0", "1F1 1F0 1B1 1B0")
    ours = add_communication(lists, Placement.looped(2, 1))
    assert [str(a) for a in ours[1] if a.kind is Kind.RECEIVE_ACTIVATION] == ["1RECV_F0", "1RECV_F1"]
    assert text(ours[1][:3]) == "1RECV_F0 1RECV_F1 1F1"


def test_sharded_stages_are_gathered_ahead_reduced_and_released_after_their_last_backward():
    lists = add_communication(
        parsed("0F0 2F0 2B0 0B0", "1F0 3F0 3B0 1B0"), Placement.looped(2, 2), sharded=True
    )
    assert text(a for a in lists[0] if a.kind.is_compute or not a.kind.has_microbatch) == (
        "0UNSHARD 2UNSHARD 0F0 2F0 2B0 2REDUCE_GRAD 2RESHARD 0B0 0REDUCE_GRAD 0RESHARD"
    )


def test_a_split_backward_reduces_after_its_last_weight_gradient():
    lists = add_communication(parsed("0F0 0F1 0I0 0I1 0W0 0W1"), Placement((0,)), sharded=True)
    assert text(lists[0]) == "0UNSHARD 0F0 0F1 0I0 0I1 0W0 0W1 0REDUCE_GRAD 0RESHARD"


def test_validation_releases_after_the_last_forward_and_reduces_nothing():
    lists = add_communication(parsed("0F0 0F1"), Placement((0,)), sharded=True)
    assert text(lists[0]) == "0UNSHARD 0F0 0F1 0RESHARD"


@pytest.mark.slow
@given(cases(max_microbatches=8))
@settings(max_examples=50, deadline=None)
def test_activations_and_gradients_between_two_ranks_could_share_one_queue(case: Case):
    placement = case.setting.placement
    sent, received = defaultdict(list), defaultdict(list)
    for actions in add_communication(case.family.generate(case.setting), placement):
        for action in actions:
            if action.kind.is_send or action.kind.is_receive:
                channel = channel_of(action, placement)
                queues = sent if action.kind.is_send else received
                queues[channel.source, channel.destination].append((channel.payload, action.microbatch))
    assert sent == received


@given(cases(max_microbatches=8))
@settings(max_examples=50, deadline=None)
def test_taking_the_communication_away_gives_the_schedule_back(case: Case):
    lists = case.family.generate(case.setting)
    for sharded in (False, True):
        assert compute_only(add_communication(lists, case.setting.placement, sharded)) == lists


def test_the_two_directions_and_payloads_of_two_ranks_are_four_channels():
    setting = Setting(Placement.looped(2, 2), 2, Costs.equal(4))
    lists = add_communication(family_named("LoopedBFS").generate(setting), setting.placement)
    channels = {channel_of(a, setting.placement) for each in lists for a in each if a.kind.is_send}
    assert channels == {
        Channel(0, 1, Payload.ACTIVATION),
        Channel(1, 0, Payload.ACTIVATION),
        Channel(0, 1, Payload.GRADIENT),
        Channel(1, 0, Payload.GRADIENT),
    }
    with pytest.raises(ValueError, match="neither a send nor a receive"):
        channel_of(Action(0, Kind.FORWARD, 0), setting.placement)
