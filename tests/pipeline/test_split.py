import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelisms.pipeline.errors import SplitError
from parallelisms.pipeline.split import split_at, split_balanced, split_by_layers, stages_per_rank


def model(layers):
    return ("tok_embeddings", *(f"layers.{i}" for i in range(layers)), "norm", "output")


@given(layers=st.integers(1, 40), data=st.data())
def test_every_module_is_in_exactly_one_stage_and_every_stage_has_a_layer(layers, data):
    stages = data.draw(st.integers(1, layers))
    costs = data.draw(st.lists(st.floats(0, 10), min_size=layers + 3, max_size=layers + 3))
    points = sorted(data.draw(st.sets(st.integers(1, layers - 1), max_size=8))) if layers > 1 else []
    for split in (
        split_balanced(model(layers), costs, stages),
        split_by_layers(model(layers), data.draw(st.integers(1, layers))),
        split_at(model(layers), [f"layers.{point}" for point in points]),
    ):
        assert tuple(module for stage in split.stages for module in stage) == model(layers)
        assert min(split.layers_per_stage) >= 1
        assert sum(split.layers_per_stage) == layers


def every_partition(costs, stages):
    layers = len(costs) - 3
    weights = list(costs[1:-2])
    weights[0] += costs[0]
    weights[-1] += costs[-2] + costs[-1]
    for inner in itertools.combinations(range(1, layers), stages - 1):
        edges = [0, *inner, layers]
        yield [sum(weights[a:b]) for a, b in itertools.pairwise(edges)]


@given(layers=st.integers(1, 9), data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_balanced_split_has_the_least_maximum_and_then_the_least_sum_of_squares(layers, data):
    stages = data.draw(st.integers(1, layers))
    costs = data.draw(st.lists(st.integers(0, 9), min_size=layers + 3, max_size=layers + 3))
    cost_of = dict(zip(model(layers), costs, strict=True))
    ours = [sum(cost_of[m] for m in stage) for stage in split_balanced(model(layers), costs, stages).stages]
    best = min((max(sums), sum(s * s for s in sums)) for sums in every_partition(costs, stages))
    assert (max(ours), sum(s * s for s in ours)) == best


def test_embedding_and_output_are_weighed():
    costs = [2.0] + [1.0] * 10 + [0.0, 4.0]
    assert (
        split_balanced(model(10), costs, 4).layers_per_stage == (2, 4, 4, 1)
        or max(split_balanced(model(10), costs, 4).layers_per_stage) <= 4
    )
    dear_output = split_balanced(model(10), [0.0] + [1.0] * 10 + [0.0, 3.0], 2)
    assert dear_output.layers_per_stage in ((6, 4), (7, 3))


def test_equal_layers_are_split_evenly():
    assert split_balanced(model(8), [0.0] + [1.0] * 8 + [0.0, 0.0], 4).layers_per_stage == (2, 2, 2, 2)
    assert sorted(split_balanced(model(10), [0.0] + [1.0] * 10 + [0.0, 0.0], 4).layers_per_stage) == [
        2,
        2,
        3,
        3,
    ]


@pytest.mark.parametrize("stages", [0, -1, 5, 100])
def test_more_stages_than_layers_or_none_are_refused(stages):
    with pytest.raises(SplitError, match=f"{stages} stages for 4 layers.*1 to 4"):
        split_balanced(model(4), [1.0] * 7, stages)


def test_split_points_begin_stages():
    split = split_at(model(4), ["layers.1", "layers.3"])
    assert split.stages == (
        ("tok_embeddings", "layers.0"),
        ("layers.1", "layers.2"),
        ("layers.3", "norm", "output"),
    )
    assert split_at(model(4), []).stages == (model(4),)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (["layers.99"], "'layers.99' is not a module of the model .nearest: 'layers.3'"),
        (["layer.2"], "'layer.2' is not a module of the model .nearest: 'layers.2'"),
        (["layers.2", "layers.1"], "'layers.1' must come after 'layers.2'"),
        (["layers.2", "layers.2"], "'layers.2' must come after 'layers.2'"),
        (["tok_embeddings"], "'tok_embeddings' must come after the first module"),
        (["layers.0"], "stage 0 would have no layer, only tok_embeddings"),
        (["norm"], "stage 1 would have no layer, only norm, output"),
    ],
)
def test_wrong_split_points_are_refused_with_the_reason(points, message):
    with pytest.raises(SplitError, match=message):
        split_at(model(4), points)


def test_layers_per_stage_leaves_the_rest_to_the_last_stage():
    assert split_by_layers(model(8), 2).layers_per_stage == (2, 2, 2, 2)
    assert split_by_layers(model(7), 3).layers_per_stage == (3, 3, 1)
    assert split_by_layers(model(3), 8).layers_per_stage == (3,)
    with pytest.raises(SplitError, match="at least 1"):
        split_by_layers(model(4), 0)


def test_ranks_must_share_the_stages_evenly():
    assert stages_per_rank(8, 4) == 2
    for stages in (3, 4):
        with pytest.raises(SplitError, match=f"{stages} stages cannot be shared evenly"):
            stages_per_rank(stages, 8 if stages == 4 else 2)
