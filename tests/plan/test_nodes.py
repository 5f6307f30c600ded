"""Who sits where: dimensions in nodes, without a list of all ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from parallelisms.layout import Layout
from trainer.plan.nodes import global_ranks, place_in_nodes


def test_the_innermost_dimension_sits_inside_a_node_and_the_outermost_across() -> None:
    nodes = place_in_nodes(Layout(pipeline=4, replicate=2, shard=8), 8)
    assert nodes.count == 8
    assert nodes.place("shard").where == "neighbours, inside a node"
    assert nodes.place("replicate").where == "every 8 ranks, each in another node"
    assert nodes.place("pipeline").stride == 16


def test_a_dimension_larger_than_a_node_says_how_much_of_it_shares_one() -> None:
    place = place_in_nodes(Layout(shard=64), 8).place("shard")
    assert (place.crosses_nodes, place.in_node) == (True, 8)
    assert place.where == "neighbours, 8 in a node"


def test_a_job_smaller_than_a_node_sits_in_it() -> None:
    assert not any(place.crosses_nodes for place in place_in_nodes(Layout(pipeline=3, shard=2), 8).dimensions)


degrees = st.integers(1, 6)


@given(degrees, degrees, degrees, st.integers(1, 9))
def test_a_dimension_crosses_nodes_if_and_only_if_a_group_of_it_does(
    pipeline: int, replicate: int, shard: int, size: int
) -> None:
    layout = Layout(pipeline, replicate, shard)
    nodes = place_in_nodes(layout, size)
    for place in nodes.dimensions:
        groups: dict[tuple[tuple[str, int], ...], set[int]] = {}
        for rank in range(layout.world_size):
            others = tuple(each for each in layout.coordinates(rank).items() if each[0] != place.name)
            groups.setdefault(others, set()).add(rank // size)
        assert place.crosses_nodes == any(len(group) > 1 for group in groups.values())


@given(degrees, degrees, degrees)
def test_the_ranks_at_one_place_of_the_pipeline_are_consecutive(
    pipeline: int, replicate: int, shard: int
) -> None:
    layout = Layout(pipeline, replicate, shard)
    for place in range(pipeline):
        first, last = global_ranks(layout, place)
        there = [rank for rank in range(layout.world_size) if layout.pipeline_rank(rank) == place]
        assert there == list(range(first, last + 1))


def test_expert_groups_lie_where_their_ranks_do() -> None:
    nodes = place_in_nodes(Layout(shard=8, tensor=2, expert=8), 8)
    place = nodes.place("expert")
    assert (place.degree, place.stride, place.in_node) == (8, 2, 4)
    assert place.crosses_nodes
    assert not place_in_nodes(Layout(shard=8, tensor=2, expert=4), 8).place("expert").crosses_nodes
    assert all(place.name != "expert" for place in place_in_nodes(Layout(shard=8), 8).dimensions)
