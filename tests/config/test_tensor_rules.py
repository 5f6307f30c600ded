"""Tensor-parallel degrees that a model cannot have are refused before anything is started, with those that fit."""

from __future__ import annotations

import pytest

from tests.config.reports import rules_broken


@pytest.mark.parametrize(
    ("degree", "says"),
    [
        (3, "n_kv_heads 8 is not divisible by 3, nor 3 by 8; allowed: 1, 2, 4, 8, 16 or 32"),
        (12, "n_kv_heads 8 is not divisible by 12, nor 12 by 8; allowed: 1, 2, 4, 8, 16 or 32"),
        (64, "n_heads 32 is not divisible by 64; allowed: 1, 2, 4, 8, 16 or 32"),
    ],
)
def test_heads_that_the_degree_does_not_divide_are_refused_with_the_degrees_that_fit(
    degree: int, says: str
) -> None:
    """Case O1: key and value heads not divisible by the degree end in a reshape that says nothing."""
    model = ("--model.name", "llama3", "--model.flavor", "8B", "--training.seq_len", "192")
    (message,) = rules_broken(*model, "--training.tensor_parallel_degree", str(degree))
    assert f"--training.tensor_parallel_degree {degree}: " in message
    assert says in message


@pytest.mark.parametrize("degree", [2, 8, 16, 32])
def test_degrees_beyond_the_key_heads_pass_where_they_are_a_multiple(degree: int) -> None:
    model = ("--model.name", "llama3", "--model.flavor", "8B", "--training.seq_len", "192")
    assert rules_broken(*model, "--training.tensor_parallel_degree", str(degree)) == []
