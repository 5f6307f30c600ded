"""ZB-H1, ZB-H2, InterleavedZeroBubble, ZBV, DualPipeV: at their bounds, within their memory, like torch's."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelisms.pipeline.actions import Action, Kind
from parallelisms.pipeline.bounds import split_bound
from parallelisms.pipeline.communicate import add_communication
from parallelisms.pipeline.schedules import dualpipev, interleaved_zero_bubble, zbv, zero_bubble
from parallelisms.pipeline.schedules.zero_bubble import alternate_with_delayed_weights
from parallelisms.pipeline.setting import Placement, Setting
from parallelisms.pipeline.simulate import simulate
from parallelisms.pipeline.verify import verify
from tests.pipeline.settings import costs, shared_equally

V_FAMILIES = (zbv.FAMILY, dualpipev.FAMILY)


def proven(family, placement, microbatches, times=None):
    """The proof and the prediction of a schedule; f = b = w = 1 for a rank's whole share unless told."""
    times = times or shared_equally(placement)
    lists = add_communication(family.generate(Setting(placement, microbatches, times)), placement)
    return verify(lists, placement, microbatches), simulate(lists, placement, times)


def idle_times(prediction, work):
    """For each rank its bubble: the time from its first start to its last end, less its work."""
    return [spans[-1].end - spans[0].start - work for spans in prediction.spans]


@pytest.mark.parametrize("ranks", range(1, 9))
def test_zb_h1_is_exactly_at_the_split_bound_for_every_number_of_microbatches(ranks):
    for microbatches in range(1, 25):
        proof, prediction = proven(zero_bubble.H1, Placement.looped(ranks, 1), microbatches)
        assert prediction.step == pytest.approx(split_bound(ranks, microbatches), rel=1e-12)
        assert max(proof.peak_activations) == min(ranks, microbatches)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (8, 16), (8, 23)])
def test_zb_h1_has_the_bubble_of_the_paper_on_every_rank(ranks, microbatches):
    _, prediction = proven(zero_bubble.H1, Placement.looped(ranks, 1), microbatches)
    assert idle_times(prediction, 3 * microbatches)[0] == pytest.approx(ranks - 1)  # (p-1)(f+b-w)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (8, 16), (8, 23)])
def test_zb_h2_has_no_bubble_on_any_rank_for_equal_parts(ranks, microbatches):
    proof, prediction = proven(zero_bubble.H2, Placement.looped(ranks, 1), microbatches)
    assert max(prediction.rank_bubbles) == pytest.approx(0.0)
    assert max(proof.peak_activations) == min(2 * ranks - 1, microbatches)


@given(ranks=st.integers(1, 8), microbatches=st.integers(1, 24), data=st.data())
@settings(max_examples=60, deadline=None)
def test_zb_h2_is_never_longer_than_zb_h1_and_holds_at_most_2p_less_1(ranks, microbatches, data):
    placement = Placement.looped(ranks, 1)
    times = data.draw(st.one_of(st.just(shared_equally(placement)), costs(ranks)))
    proof, deep = proven(zero_bubble.H2, placement, microbatches, times)
    _, flat = proven(zero_bubble.H1, placement, microbatches, times)
    assert max(proof.peak_activations) <= min(2 * ranks - 1, microbatches)
    if times.transfer == 0:
        assert deep.step <= flat.step * (1 + 1e-6)


def test_weights_come_the_delay_after_their_own_inputs_and_the_rest_at_the_end():
    forwards = [Action(0, Kind.FORWARD, each) for each in range(3)]
    inputs = [Action(0, Kind.BACKWARD_INPUT, each) for each in range(3)]
    actions = alternate_with_delayed_weights(forwards, inputs, warm_up=1, delay=1)
    assert " ".join(map(str, actions)) == "0F0 0F1 0I0 0F2 0I1 0W0 0I2 0W1 0W2"


@given(ranks=st.integers(1, 8), each=st.integers(1, 4), microbatches=st.integers(1, 24))
@settings(max_examples=60, deadline=None)
def test_interleaved_zero_bubble_is_exactly_at_its_bound_from_as_many_microbatches_as_ranks(
    ranks, each, microbatches
):
    placement = Placement.looped(ranks, each)
    proof, prediction = proven(interleaved_zero_bubble.FAMILY, placement, microbatches)
    wanted = (ranks - 1) / each + 3 * microbatches
    if microbatches >= ranks:
        assert prediction.step == pytest.approx(wanted, rel=1e-9)
    else:
        assert prediction.step <= 1.13 * prediction.bound
    assert max(proof.peak_share) <= microbatches


def test_with_one_stage_per_rank_interleaved_zero_bubble_is_zb_h1():
    setting = Setting(Placement.looped(4, 1), 6, shared_equally(Placement.looped(4, 1)))
    assert interleaved_zero_bubble.FAMILY.generate(setting) == zero_bubble.H1.generate(setting)


@pytest.mark.parametrize("ranks", range(1, 9))
def test_zbv_has_no_bubble_on_any_rank_and_holds_what_1f1b_does(ranks):
    for microbatches in (1, 2, ranks, 2 * ranks - 1, 2 * ranks, 2 * ranks + 1, 24):
        proof, prediction = proven(zbv.FAMILY, Placement.v_shaped(ranks), microbatches)
        assert max(proof.peak_share) <= min(ranks, microbatches)
        if microbatches >= 2 * ranks:
            assert max(prediction.rank_bubbles) == pytest.approx(0.0)
            skew = (ranks - 1) / 2
            assert prediction.step == pytest.approx(3 * microbatches + skew)


@pytest.mark.parametrize("ranks", range(1, 9))
def test_dualpipev_is_at_the_bound_for_equal_parts_and_holds_at_most_p_and_a_half(ranks):
    for microbatches in (2 * ranks, 2 * ranks + 1, 24):
        proof, prediction = proven(dualpipev.FAMILY, Placement.v_shaped(ranks), microbatches)
        assert prediction.step == pytest.approx(prediction.bound)
        assert max(proof.peak_share) <= min(ranks + 0.5, microbatches)


@pytest.mark.parametrize("family", V_FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("ranks", [3, 5, 8])
def test_few_microbatches_on_a_v_are_closed_up(family, ranks):
    for microbatches in range(1, 2 * ranks):
        _, prediction = proven(family, Placement.v_shaped(ranks), microbatches)
        assert prediction.step <= 1.10 * prediction.bound


def torchs_list(schedule_class, ranks, stages_per_rank, microbatches, rank):
    """What torch's class would run on a rank, in our spelling."""
    schedule = schedule_class.__new__(schedule_class)
    schedule.pp_group_size = ranks
    schedule.rank = rank
    schedule.n_local_stages = stages_per_rank
    schedule.num_stages = schedule._num_stages = ranks * stages_per_rank
    schedule._n_microbatches = microbatches
    schedule.number_of_rounds = max(1, microbatches // ranks)
    schedule.microbatches_per_round = microbatches // schedule.number_of_rounds
    flat = []
    for action in schedule._calculate_single_rank_operations(rank):
        if action is not None:
            flat += action.sub_actions or (action,)
    return [f"{each.stage_index}{each.computation_type.value}{each.microbatch_index}" for each in flat]


@pytest.mark.parametrize(
    ("family", "torchs_name", "fewest"),
    [
        (interleaved_zero_bubble.FAMILY, "ScheduleInterleavedZeroBubble", 1),
        (zbv.FAMILY, "ScheduleZBVZeroBubble", 2),
        (dualpipev.FAMILY, "ScheduleDualPipeV", 2),
    ],
    ids=["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"],
)
def test_the_lists_are_torchs_where_torch_takes_the_setting(family, torchs_name, fewest):
    torchs = getattr(pytest.importorskip("torch.distributed.pipelining.schedules"), torchs_name)
    for ranks in (2, 3, 4, 8):
        placement = Placement.v_shaped(ranks) if family.placement == "v" else Placement.looped(ranks, 2)
        for microbatches in range(int(fewest * ranks), 25):
            rounds = max(1, microbatches // ranks)
            if family.placement == "loop" and microbatches % rounds:
                continue  # refused by torch
            lists = family.generate(Setting(placement, microbatches, shared_equally(placement)))
            for rank in range(ranks):
                wanted = torchs_list(torchs, ranks, 2, microbatches, rank)
                assert [str(action) for action in lists[rank]] == wanted
