import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelisms.pipeline.bounds import lower_bound, split_bound, unsplit_bound
from parallelisms.pipeline.setting import Costs, Placement
from tests.pipeline.settings import costs, shared_equally

times = st.floats(0.1, 5.0)


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 24), times, times, times)
def test_the_general_bound_is_the_closed_one_for_equal_unsplit_looped_stages(
    ranks, each, microbatches, f, b, w
):
    placement = Placement.looped(ranks, each)
    general = lower_bound(placement, shared_equally(placement, f, b, w), microbatches)
    assert general == pytest.approx(unsplit_bound(ranks, each, microbatches, f, b + w))


@given(st.integers(1, 8), st.integers(1, 24), times, times, times)
def test_the_general_bound_is_the_closed_one_for_equal_split_stages(ranks, microbatches, f, b, w):
    placement = Placement.looped(ranks, 1)
    general = lower_bound(placement, Costs.equal(ranks, f, b, w), microbatches, splits_backward=True)
    assert general == pytest.approx(split_bound(ranks, microbatches, f, b, w))


def test_the_figures_of_the_papers_at_four_ranks_and_eight_microbatches():
    assert unsplit_bound(4, 1, 8) == 33
    assert split_bound(4, 8) == 27
    assert unsplit_bound(4, 2, 8) == 28.5
    v_shaped = Placement.v_shaped(4)
    assert lower_bound(v_shaped, shared_equally(v_shaped), 8, splits_backward=True) == 25.5


@given(st.data(), st.booleans())
def test_splitting_the_backward_never_raises_the_bound(data, v_shaped):
    ranks = data.draw(st.integers(1, 6))
    placement = (
        Placement.v_shaped(ranks) if v_shaped else Placement.looped(ranks, data.draw(st.integers(1, 3)))
    )
    chosen = data.draw(costs(placement.stages))
    microbatches = data.draw(st.integers(1, 12))
    whole = lower_bound(placement, chosen, microbatches)
    assert lower_bound(placement, chosen, microbatches, splits_backward=True) <= whole * (1 + 1e-9)
    assert lower_bound(placement, chosen, microbatches, forward_only=True) <= whole * (1 + 1e-9)


def shortest_step(placement: Placement, chosen: Costs, microbatches: int, split: bool) -> float:
    """The shortest step there is, by trying every order on two ranks of one stage."""
    kinds = "FIW" if split else "FB"
    duration = {
        "F": chosen.forward,
        "I": chosen.backward_input,
        "W": chosen.backward_weight,
        "B": tuple(b + w for b, w in zip(chosen.backward_input, chosen.backward_weight, strict=True)),
    }

    def orders(stage):
        actions = [(kind, microbatch) for kind in kinds for microbatch in range(microbatches)]
        for order in itertools.permutations(actions):
            places = {action: place for place, action in enumerate(order)}
            if all(
                places[kinds[k], m] < places[kinds[k + 1], m]
                for k in range(len(kinds) - 1)
                for m in range(microbatches)
            ):
                yield [(stage, *action) for action in order]

    def step(lists):
        ends, free, at = {}, [0.0, 0.0], [0, 0]
        moved = True
        while moved:
            moved = False
            for rank in (0, 1):
                while at[rank] < len(lists[rank]):
                    stage, kind, microbatch = lists[rank][at[rank]]
                    need = None
                    if kind == "F" and stage == 1:
                        need = (0, "F", microbatch)
                    if kind in "IB" and stage == 0:
                        need = (1, kind, microbatch)
                    if need is not None and need not in ends:
                        break
                    start = max(free[rank], ends.get(need, 0.0) + chosen.transfer * (need is not None))
                    free[rank] = ends[stage, kind, microbatch] = start + duration[kind][stage]
                    at[rank] += 1
                    moved = True
        complete = all(position == len(row) for position, row in zip(at, lists, strict=True))
        return max(free) if complete else float("inf")

    return min(step(pair) for pair in itertools.product(list(orders(0)), list(orders(1))))


@given(st.data(), st.sampled_from([(1, True), (2, True), (1, False), (2, False)]))
@settings(max_examples=30, deadline=None)
def test_no_order_at_all_beats_the_bound(data, shape):
    microbatches, split = shape
    placement = Placement.looped(2, 1)
    chosen = data.draw(costs(2))
    bound = lower_bound(placement, chosen, microbatches, splits_backward=split)
    assert shortest_step(placement, chosen, microbatches, split) >= bound * (1 - 1e-9)
