"""The shuffled order: a permutation of every size, without a table, that no release may change."""

from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.permutation import Permutation


@settings(deadline=None)
@given(count=st.integers(1, 700), seed=st.integers(0, 2**40), epoch=st.integers(0, 1000))
def test_every_element_comes_exactly_once(count: int, seed: int, epoch: int) -> None:
    order = Permutation(count, seed, epoch)
    assert sorted(order[i] for i in range(count)) == list(range(count))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {
        tuple(Permutation(100, *key)[i] for i in range(100)) for key in [(0, 0), (0, 1), (1, 0), (1, 1)]
    }
    assert len(orders) == 4


def test_first_elements_are_spread_over_the_whole_range() -> None:
    """Over many keys each element comes first about equally often (5 standard deviations)."""
    count, keys = 10, 5000
    firsts = [Permutation(count, seed, 0)[0] for seed in range(keys)]
    expected = keys / count
    assert all(abs(firsts.count(i) - expected) < 5 * (expected * 0.9) ** 0.5 for i in range(count))


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 5000), seed=st.integers(0, 2**40), share=st.floats(0, 1))
def test_walking_is_the_same_as_asking_for_each(count: int, seed: int, share: float) -> None:
    order, begin = Permutation(count, seed), int(share * count)
    assert list(order.walk(begin)) == [order[i] for i in range(begin, count)]


def test_a_trillion_documents_need_no_table() -> None:
    assert 0 <= Permutation(10**12, 0, 0)[10**12 - 1] < 10**12


def test_the_order_is_the_one_that_older_checkpoints_mean() -> None:
    assert [Permutation(10, 0, 0)[i] for i in range(10)] == [4, 2, 1, 5, 8, 7, 6, 3, 9, 0]
