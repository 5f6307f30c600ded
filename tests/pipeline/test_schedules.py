"""GPipe, 1F1B, Interleaved1F1B and LoopedBFS: exactly at their bound, within their memory, for every setting."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelisms.pipeline.actions import Kind
from parallelisms.pipeline.bounds import unsplit_bound
from parallelisms.pipeline.communicate import add_communication
from parallelisms.pipeline.errors import IllegalSettingError
from parallelisms.pipeline.schedules import forward_only, gpipe, interleaved, looped_bfs, one_f_one_b
from parallelisms.pipeline.schedules.interleaved import equal_groups
from parallelisms.pipeline.setting import Costs, Placement, Setting
from parallelisms.pipeline.simulate import simulate
from parallelisms.pipeline.verify import verify
from tests.pipeline.settings import family_named, shared_equally

MULTI_STAGE = ("Interleaved1F1B", "LoopedBFS")
SINGLE_STAGE = ("GPipe", "1F1B")


def proven(name, ranks, stages_per_rank, microbatches, f=1.0, b=1.0, w=1.0):
    family = family_named(name)
    placement = family.place(ranks, stages_per_rank)
    setting = Setting(placement, microbatches, shared_equally(placement, f, b, w))
    family.check(setting)
    lists = add_communication(family.generate(setting), placement)
    return verify(lists, placement, microbatches), simulate(lists, placement, setting.costs)


@pytest.mark.parametrize("name", SINGLE_STAGE)
@pytest.mark.parametrize("ranks", range(1, 9))
def test_single_stage_schedules_are_exactly_at_the_bound_for_every_number_of_microbatches(name, ranks):
    for microbatches in range(1, 25):
        proof, prediction = proven(name, ranks, 1, microbatches)
        assert prediction.step == pytest.approx(unsplit_bound(ranks, 1, microbatches), rel=1e-12)
        assert prediction.bound == pytest.approx(prediction.step, rel=1e-12)
        held = microbatches if name == "GPipe" else min(ranks, microbatches)
        assert max(proof.peak_activations) == held


def test_one_f_one_b_holds_fewer_activations_on_later_ranks():
    proof, _ = proven("1F1B", 4, 1, 8)
    assert proof.peak_activations == (4, 3, 2, 1)


@pytest.mark.parametrize("name", MULTI_STAGE)
@given(
    ranks=st.integers(1, 8),
    stages_per_rank=st.integers(1, 4),
    microbatches=st.integers(1, 24),
    f=st.sampled_from((0.5, 1.0, 2.0, 3.0)),
)
@settings(max_examples=150, deadline=None)
def test_looped_schedules_are_exactly_at_the_bound(name, ranks, stages_per_rank, microbatches, f):
    _, prediction = proven(name, ranks, stages_per_rank, microbatches, f)
    wanted = unsplit_bound(ranks, stages_per_rank, microbatches, f, 2.0)
    assert prediction.step == pytest.approx(wanted, rel=1e-12)
    assert prediction.bound == pytest.approx(wanted, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", MULTI_STAGE)
def test_looped_schedules_are_exactly_at_the_bound_in_every_setting(name):
    for ranks in (1, 2, 3, 4, 6, 8):
        for stages_per_rank in range(1, 5):
            for microbatches in range(1, 25):
                for f in (1.0, 2.0) if ranks == 4 else (1.0,):
                    _, prediction = proven(name, ranks, stages_per_rank, microbatches, f)
                    assert prediction.step == pytest.approx(
                        unsplit_bound(ranks, stages_per_rank, microbatches, f, 2.0), rel=1e-12
                    ), (ranks, stages_per_rank, microbatches, f)


@pytest.mark.parametrize(("ranks", "stages_per_rank"), [(2, 2), (4, 2), (4, 4), (8, 3)])
@pytest.mark.parametrize("rounds", [2, 3])
def test_interleaved_holds_what_the_formula_says_when_ranks_divide_microbatches(
    ranks, stages_per_rank, rounds
):
    proof, _ = proven("Interleaved1F1B", ranks, stages_per_rank, ranks * rounds)
    assert max(proof.peak_share) == pytest.approx(ranks + (ranks - 1) / stages_per_rank)


def test_interleaved_never_holds_more_than_1_54_times_the_formula():
    for ranks, stages_per_rank, microbatches in [(8, 4, 15), (8, 4, 23), (4, 3, 7), (8, 2, 15), (3, 4, 5)]:
        proof, _ = proven("Interleaved1F1B", ranks, stages_per_rank, microbatches)
        assert max(proof.peak_share) <= 1.54 * (ranks + (ranks - 1) / stages_per_rank)
        assert max(proof.peak_share) <= microbatches


def test_looped_bfs_holds_every_microbatch():
    proof, _ = proven("LoopedBFS", 4, 2, 7)
    assert proof.peak_share == (7.0,) * 4


@pytest.mark.parametrize("name", MULTI_STAGE)
def test_with_one_stage_per_rank_looped_schedules_are_their_single_stage_ones(name):
    setting = Setting(Placement.looped(4, 1), 5, Costs.equal(4))
    single = {"Interleaved1F1B": "1F1B", "LoopedBFS": "GPipe"}[name]
    assert family_named(name).generate(setting) == family_named(single).generate(setting)


@pytest.mark.parametrize("name", SINGLE_STAGE)
def test_single_stage_schedules_refuse_two_stages_per_rank_and_name_one_that_takes_them(name):
    with pytest.raises(IllegalSettingError, match=f"{name} has one stage per rank.*Interleaved1F1B"):
        family_named(name).place(4, 2)
    with pytest.raises(IllegalSettingError, match="one stage per rank"):
        family_named(name).check(Setting(Placement.v_shaped(2), 4, Costs.equal(4)))


def test_a_schedule_refuses_a_placement_that_is_not_its_own():
    with pytest.raises(
        IllegalSettingError, match=r"needs the stages on ranks \[0, 1, 0, 1\], not on \[0, 1, 1, 0\]"
    ):
        family_named("LoopedBFS").check(Setting(Placement.v_shaped(2), 4, Costs.equal(4)))


def test_a_schedule_refuses_uneven_ranks_no_microbatches_and_costs_of_other_stages():
    family = family_named("LoopedBFS")
    with pytest.raises(IllegalSettingError, match="3 stages on 2 ranks"):
        family.check(Setting(Placement((0, 1, 0)), 4, Costs.equal(3)))
    with pytest.raises(IllegalSettingError, match="0 microbatches"):
        family.check(Setting(Placement.looped(2, 2), 0, Costs.equal(4)))
    with pytest.raises(IllegalSettingError, match=r"costs.forward has 3 entries for 4 stages"):
        family.check(Setting(Placement.looped(2, 2), 4, Costs.equal(3)))
    with pytest.raises(IllegalSettingError, match="must be 1 or more"):
        family.place(0)


@given(microbatches=st.integers(1, 200), groups=st.integers(1, 30))
def test_groups_cover_all_microbatches_in_order_and_differ_by_at_most_one(microbatches, groups):
    made = equal_groups(microbatches, groups)
    assert [each for group in made for each in group] == list(range(microbatches))
    assert max(map(len, made)) - min(map(len, made)) <= 1


def picture(name, ranks, stages_per_rank, microbatches, width):
    """The rows of a docstring's picture: a forward is `width` characters long, a backward twice that."""
    family = family_named(name)
    setting = Setting(
        family.place(ranks, stages_per_rank), microbatches, Costs.equal(ranks * stages_per_rank)
    )
    spans = simulate(family.generate(setting), setting.placement, setting.costs).spans
    for rank, row in enumerate(spans):
        line = ""
        for span in row:
            text = str(span.action)[stages_per_rank == 1 :]
            length = int(span.end - span.start) * width - 1
            fill = "~" if span.action.kind is Kind.BACKWARD else " "
            line = line.ljust(int(span.start) * width) + text.ljust(length, fill)
        yield f"rank {rank} | {line}".rstrip()


@pytest.mark.parametrize(
    ("module", "shown"),
    [
        (gpipe, ("GPipe", 4, 1, 4, 3)),
        (one_f_one_b, ("1F1B", 4, 1, 6, 3)),
        (interleaved, ("Interleaved1F1B", 2, 2, 4, 4)),
        (looped_bfs, ("LoopedBFS", 2, 2, 3, 4)),
        (forward_only, None),
    ],
)
def test_the_picture_of_each_schedule_is_what_it_generates(module, shown):
    drawn = [line.strip() for line in module.__doc__.splitlines() if re.match(r"    rank \d \|", line)]
    if shown is None:
        lists = forward_only.forward_only(Setting(Placement.looped(2, 2), 4, Costs.equal(4)))
        rows = [" ".join(map(str, actions)) for actions in lists]
        assert [line.split("|")[1].strip() for line in drawn] == rows
    else:
        assert drawn == list(picture(*shown))
