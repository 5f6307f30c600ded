"""V-Half and V-Min: their memory always, their bubble for equal parts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelisms.pipeline.communicate import add_communication
from parallelisms.pipeline.schedules import v_schedules
from parallelisms.pipeline.setting import Placement, Setting
from parallelisms.pipeline.simulate import simulate
from parallelisms.pipeline.verify import verify
from tests.pipeline.settings import costs, shared_equally

CAPS = {"V-Half": lambda p: p // 2 + 1, "V-Min": lambda p: (p + 4) // 3}
# Of the bubble of 1F1B, (p-1)(f+b+w).
BUBBLES = {"V-Half": 0.5, "V-Min": 2 / 3}


@pytest.mark.parametrize("block", [v_schedules.half_block, v_schedules.min_block])
def test_a_repeated_block_never_meets_itself_for_any_number_of_ranks(block):
    for ranks in range(1, 100):
        for rank in range(ranks):
            each = block(rank, ranks)
            times = [each.forward_down, each.forward_up, each.input_up, each.input_down]
            assert times == sorted(times)
            assert len({time % 6 for time in times}) == 4


@pytest.mark.parametrize("family", v_schedules.FAMILIES, ids=lambda family: family.name)
@given(ranks=st.integers(1, 8), microbatches=st.integers(1, 24), data=st.data())
@settings(max_examples=50, deadline=None)
def test_the_memory_is_kept_for_all_costs(family, ranks, microbatches, data):
    placement = Placement.v_shaped(ranks)
    times = data.draw(st.one_of(st.just(shared_equally(placement)), costs(2 * ranks)))
    lists = family.generate(Setting(placement, microbatches, times))
    proof = verify(add_communication(lists, placement), placement, microbatches)
    assert max(proof.peak_share) <= min(CAPS[family.name](ranks), microbatches)


@pytest.mark.parametrize("family", v_schedules.FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6, 7, 8, 12, 16])
def test_the_bubble_of_a_rank_is_that_of_the_paper_for_equal_parts(family, ranks):
    placement = Placement.v_shaped(ranks)
    microbatches = 2 * ranks
    setting = Setting(placement, microbatches, shared_equally(placement))
    prediction = simulate(family.generate(setting), placement, setting.costs)
    idle = max(spans[-1].end - spans[0].start for spans in prediction.spans) - 3 * microbatches
    assert idle <= BUBBLES[family.name] * 3 * (ranks - 1)
