"""How parameters are cut over tensor-parallel ranks, as plain data, for every family."""

from __future__ import annotations

import math

import pytest

from models.registry import family, names
from parallelisms.tensor_plan import UnknownParameterError, cut_dimension, kv_heads, local_shape, undivided


def shapes(name: str) -> dict[str, tuple[int, ...]]:
    sizes = next(iter(family(name).sizes.values()))
    return {n: shape for module in sizes.modules() for n, shape in sizes.parameter_shapes(module).items()}


@pytest.mark.parametrize("name", names())
def test_every_parameter_of_every_family_is_known_and_every_matrix_that_grows_is_cut(name: str) -> None:
    sizes = next(iter(family(name).sizes.values()))
    heads, degree = kv_heads(sizes), 2
    for parameter, shape in shapes(name).items():
        local = local_shape(parameter, shape, degree, heads)
        whole = "norm" in parameter or ".gate." in parameter or parameter.split(".")[-2] in ("wq_a", "wkv_a")
        assert math.prod(local) * (1 if whole else degree) == math.prod(shape), parameter


def test_the_dimensions_are_those_of_megatron() -> None:
    assert cut_dimension("layers.3.attention.wq.weight", 2) == 0
    assert cut_dimension("layers.3.attention.wo.weight", 2) == 1
    assert cut_dimension("layers.3.feed_forward.w3.weight", 2) == 0
    assert cut_dimension("layers.3.moe.experts.w1", 2) == 1
    assert cut_dimension("layers.3.moe.experts.w2", 2) == 2
    assert cut_dimension("layers.3.attention.q_norm.weight", 2) is None
    assert cut_dimension("output.weight", 2) == 0


@pytest.mark.parametrize(("degree", "cut"), [(1, 0), (2, 0), (4, 0), (8, None), (16, None)])
def test_with_fewer_key_heads_than_ranks_every_rank_has_all_of_them(degree: int, cut: int | None) -> None:
    assert cut_dimension("layers.0.attention.wk.weight", degree, kv_heads=4) == cut
    assert cut_dimension("layers.0.attention.wq.weight", degree, kv_heads=4) == 0


@pytest.mark.parametrize(
    "name", ["layers.0.mixer.w1.weight", "layers.0.attention.wx.weight", "head.weight", "layers.0.wq.weight"]
)
def test_a_parameter_that_is_not_known_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnknownParameterError, match=name):
        cut_dimension(name, 2)


def test_degrees_that_fit_leave_nothing_undivided_and_others_say_what() -> None:
    sizes = family("llama3").sizes["debug"]
    assert [degree for degree in range(1, 17) if not undivided(sizes, degree)] == [1, 2, 4, 8]
    assert set(undivided(sizes, 3)) == {"n_heads", "ffn_hidden", "vocab_size", "n_kv_heads"}
