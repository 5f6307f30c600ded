"""The verifier refuses each kind of broken schedule and names the actions."""

import re
import time

import pytest

from parallelisms.pipeline.actions import Action
from parallelisms.pipeline.communicate import add_communication
from parallelisms.pipeline.errors import (
    ChannelError,
    DeadlockError,
    MissingActionError,
    OrderError,
    RepeatedActionError,
    ShardingError,
    UnknownActionError,
)
from parallelisms.pipeline.schedules.interleaved import interleaved_1f1b
from parallelisms.pipeline.setting import Costs, Placement, Setting
from parallelisms.pipeline.verify import verify

TWO = Placement.looped(2, 1)
GOOD = (
    "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1",
    "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
)


def parsed(*rows):
    return tuple(tuple(map(Action.parse, row.split())) for row in rows)


def refused(error, message, *rows, placement=TWO, microbatches=2, **options):
    with pytest.raises(error, match=re.escape(message)):
        verify(parsed(*rows), placement, microbatches, **options)


def test_a_good_schedule_is_proven_with_its_figures():
    proof = verify(parsed(*GOOD), TWO, 2)
    assert (proof.actions, proof.messages) == (16, 4)
    assert proof.peak_activations == (2, 1)
    assert proof.peak_share == (2.0, 1.0)


def test_sends_that_cross_are_accepted_for_posting_never_blocks():
    # Both ranks send before they receive: this deadlocks where a send waits for its receive.
    verify(
        parsed("0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1", GOOD[1]),
        TWO,
        2,
    )


def test_swapped_receives_are_refused():
    refused(
        ChannelError,
        "rank 0 -> rank 1 (activations): message 0 is sent by 0SEND_F0 but received by 1RECV_F1",
        GOOD[0],
        "1RECV_F1 1RECV_F0 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    )


def test_a_missing_send_is_refused():
    refused(
        MissingActionError,
        "rank 0 never posts 0SEND_F1: rank 1 would wait for it for ever",
        GOOD[0].replace("0SEND_F1 ", ""),
        GOOD[1],
    )


def test_a_missing_receive_is_refused():
    refused(
        MissingActionError,
        "rank 1 never posts 1RECV_F1: the send of rank 0 would never meet it",
        GOOD[0],
        GOOD[1].replace("1RECV_F1 ", ""),
    )


@pytest.mark.parametrize(
    ("replacement", "message"),
    [
        ("1B1 1B1", "rank 1 has 1B1 twice, as actions 6 and 7 of its list"),
        ("1B1 1W1", "double backward: 1B1 is the whole of it, and 1W1 repeats a part"),
        ("1I1 1W1 1B1", "double backward: 1B1 is the whole of it, and 1I1 repeats a part"),
    ],
)
def test_a_double_backward_is_refused(replacement, message):
    refused(RepeatedActionError, message, GOOD[0], GOOD[1].replace("1B1", replacement))


def test_a_cycle_is_refused_naming_who_waits_where_for_whom():
    with pytest.raises(DeadlockError) as error:
        verify(
            parsed(
                "0F0 0SEND_F0 0RECV_B0 0B0 0RECV_B1 0F1 0SEND_F1 0B1",
                "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
            ),
            TWO,
            2,
        )
    assert str(error.value) == (
        "deadlock: rank 0 waits at 0B0 for 1SEND_B0 of rank 1; rank 1 waits at 1F1 for 0SEND_F1 of rank 0"
    )


def test_ranks_that_merely_wait_for_a_cycle_are_not_named_as_part_of_it():
    placement = Placement.looped(3, 1)
    rows = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F0 2F1 2B0 2B1")
    with pytest.raises(DeadlockError) as error:
        verify(add_communication(parsed(*rows), placement), placement, 2)
    assert str(error.value) == (
        "deadlock: rank 1 waits at 1B0 for 2SEND_B0 of rank 2; rank 2 waits at 2F1 for 1SEND_F1 of rank 1"
    )


def test_the_short_last_group_of_a_naive_interleaved_schedule_is_refused():
    # p = 4, m = 5, v = 3: groups of p with a last group of one.
    ranks, each, microbatches = 4, 3, 5
    placement = Placement.looped(ranks, each)
    lists = []
    for rank in range(ranks):
        stages = placement.stages_of(rank)
        groups = (range(4), range(4, 5))
        forwards = [f"{s}F{m}" for group in groups for s in stages for m in group]
        backwards = [f"{s}B{m}" for group in groups for s in reversed(stages) for m in group]
        warm_up = 2 * (ranks - 1 - rank) + (each - 1) * ranks
        row = forwards[:warm_up]
        for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
            row += [forward, backward]
        lists.append(" ".join(row + backwards[len(forwards) - warm_up :]))
    with pytest.raises((DeadlockError, OrderError), match=r"waits at|depends on"):
        verify(add_communication(parsed(*lists), placement), placement, microbatches)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((GOOD[0] + " 2F0", GOOD[1]), "rank 0: 2F0: stage 2 is unknown, there are 2 (0 to 1)"),
        ((GOOD[0] + " 1F0", GOOD[1]), "rank 0: 1F0: stage 1 belongs to rank 1"),
        ((GOOD[0] + " 0F2", GOOD[1]), "rank 0: 0F2: microbatch 2 is unknown, there are 2 (0 to 1)"),
        ((GOOD[0].replace("0F1", "0F1.0"), GOOD[1]), "0F1.0 is for a part of a sequence"),
        ((GOOD[0],), "1 lists of actions for 2 ranks"),
    ],
)
def test_unknown_stages_ranks_and_microbatches_are_refused(rows, message):
    refused(UnknownActionError, message, *rows)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("0F0 0B0 0B1", "rank 0 never runs 0F1"),
        ("0F0 0F1 0B0", "rank 0 never runs a backward of stage 0, microbatch 1: 0B1, or 0I1 and 0W1"),
        ("0F0 0F1 0B0 0I1", "rank 0 never runs 0W1"),
        ("0F0 0F1 0B0 0W1", "rank 0 never runs 0I1"),
    ],
)
def test_a_missing_microbatch_is_refused(row, message):
    refused(MissingActionError, message, row, placement=Placement((0,)))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (("0B0 0F0",), "rank 0 runs 0B0 before 0F0, which it depends on"),
        (("0F0 0W0 0I0",), "rank 0 runs 0W0 before 0I0"),
        (("1F0 0F0 1B0 0B0",), "rank 0 runs 1F0 before 0F0"),
        (("0F0 1F0 0B0 1I0 1W0",), "rank 0 runs 0B0 before 1I0"),
        (
            (GOOD[0].replace("0F0 0SEND_F0", "0SEND_F0 0F0"), GOOD[1]),
            "rank 0 posts 0SEND_F0 before it has computed what is sent",
        ),
        (
            (GOOD[0], GOOD[1].replace("1RECV_F0 1F0", "1F0 1RECV_F0")),
            "rank 1 uses what 1RECV_F0 receives before it is posted",
        ),
    ],
)
def test_what_stands_before_its_own_dependency_is_refused(rows, message):
    two_stages = "1F0" in rows[0]
    placement = TWO if len(rows) == 2 else Placement((0,) * (1 + two_stages))
    refused(OrderError, message, *rows, placement=placement, microbatches=len(rows))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (("0RECV_F0", ""), "rank 0 has 0RECV_F0, but that message does not exist"),
        (("0SEND_B1", ""), "rank 0 has 0SEND_B1, but that message does not exist"),
        (("", "1SEND_F0"), "rank 1 has 1SEND_F0, but that message does not exist"),
    ],
)
def test_messages_beyond_the_ends_of_the_pipeline_are_refused(extra, message):
    refused(ChannelError, message, *(f"{row} {more}" for row, more in zip(GOOD, extra, strict=True)))


def test_a_message_between_neighbours_on_one_rank_is_refused():
    refused(
        ChannelError,
        "0SEND_F0, but that message does not exist",
        "0F0 0SEND_F0 1F0 1B0 0B0",
        placement=Placement((0, 0)),
        microbatches=1,
    )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            "0F0 0UNSHARD 0B0 0REDUCE_GRAD 0RESHARD",
            "rank 0 runs 0F0 while the parameters of its stage are sharded",
        ),
        (
            "0UNSHARD 0F0 0RESHARD 0B0 0REDUCE_GRAD",
            "rank 0 runs 0B0 while the parameters of its stage are sharded",
        ),
        ("0UNSHARD 0UNSHARD 0F0 0B0 0REDUCE_GRAD 0RESHARD", "0UNSHARD: the parameters are already gathered"),
        ("0UNSHARD 0F0 0B0 0REDUCE_GRAD 0RESHARD 0RESHARD", "0RESHARD: the parameters are already released"),
        ("0UNSHARD 0F0 0B0 0REDUCE_GRAD", "never releases the parameters of stage 0: 0RESHARD is missing"),
        ("0UNSHARD 0F0 0B0 0RESHARD", "never reduces the gradients of stage 0: 0REDUCE_GRAD is missing"),
        ("0UNSHARD 0F0 0REDUCE_GRAD 0B0 0RESHARD", "rank 0 runs 0B0 after the gradients were reduced"),
        ("0UNSHARD 0F0 0B0 0REDUCE_GRAD 0REDUCE_GRAD 0RESHARD", "rank 0 has 0REDUCE_GRAD twice"),
        ("0F0 0B0", "rank 0 runs 0F0 while the parameters of its stage are sharded"),
    ],
)
def test_misplaced_gathering_releasing_and_reducing_is_refused(row, message):
    refused(ShardingError, message, row, placement=Placement((0,)), microbatches=1, sharded=True)


def test_gathering_again_after_a_release_is_accepted():
    row = "0UNSHARD 0F0 0RESHARD 0UNSHARD 0B0 0REDUCE_GRAD 0RESHARD"
    assert verify(parsed(row), Placement((0,)), 1).actions == 7


def test_sharding_actions_are_refused_where_nothing_is_sharded():
    row = "0UNSHARD 0F0 0B0 0REDUCE_GRAD 0RESHARD"
    refused(
        ShardingError,
        "parameters are not sharded",
        row,
        placement=Placement((0,)),
        microbatches=1,
        sharded=False,
    )


def test_a_backward_in_validation_is_refused_and_forwards_alone_in_training():
    one = {"placement": Placement((0,)), "microbatches": 1}
    refused(UnknownActionError, "in a forward-only step", "0F0 0B0", forward_only=True, **one)
    refused(MissingActionError, "never runs a backward", "0F0", **one)
    refused(
        ShardingError,
        "in a forward-only step",
        "0UNSHARD 0F0 0REDUCE_GRAD 0RESHARD",
        forward_only=True,
        **one,
    )


def test_sixteen_ranks_with_four_stages_and_64_microbatches_are_proven_at_once():
    setting = Setting(Placement.looped(16, 4), 64, Costs.equal(64))
    lists = add_communication(interleaved_1f1b(setting), setting.placement)
    start = time.process_time()  # of the processor, whatever else the machine does
    verify(lists, setting.placement, 64)
    assert time.process_time() - start < 5.0  # 0.2 s on an idle machine


@pytest.mark.slow
def test_the_proof_takes_time_linear_in_the_number_of_actions():
    def seconds_per_action(microbatches):
        setting = Setting(Placement.looped(64, 1), microbatches, Costs.equal(64))
        lists = add_communication(interleaved_1f1b(setting), setting.placement)
        start = time.perf_counter()
        actions = verify(lists, setting.placement, microbatches).actions
        return (time.perf_counter() - start) / actions

    small = min(seconds_per_action(64) for _ in range(3))
    assert seconds_per_action(512) < 4 * small
