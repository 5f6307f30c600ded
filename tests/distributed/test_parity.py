"""Layouts in which other trainers went wrong are the same training run as one process; see the parity matrix for all
others."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from tests.distributed.training_run import Tables, assert_same_run, merged, train


@cache
def one_process(batch_size: int, global_batch_size: int | None = None) -> list[dict[str, Any]]:
    """The reference: the whole global batch in one process, one microbatch."""
    size = batch_size if global_batch_size is None else global_batch_size
    return train(Path(mkdtemp()), 1, {"training": {"batch_size": size}})


def pipeline(degree: int, schedule: str, microbatches: int | None = None, **keys: Any) -> dict[str, Any]:
    table: dict[str, Any] = {
        "pipeline_parallel_degree": degree,
        "pipeline_parallel_schedule": schedule,
        **keys,
    }
    return table if microbatches is None else {**table, "pipeline_parallel_microbatches": microbatches}


def check(folder: Path, world_size: int, tables: Tables, reference: list[dict[str, Any]]) -> None:
    assert_same_run(reference, train(folder, world_size, tables))


@pytest.mark.parametrize("microbatches", [1, 3, 8])
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize("degree", [2, 4])
def test_pipeline_equals_one_process(tmp_path: Path, degree: int, schedule: str, microbatches: int) -> None:
    """Cases P13 (initial parameters, bit for bit) and L4 (the gradient norm is that of all stages)."""
    check(tmp_path, degree, {"experimental": pipeline(degree, schedule, microbatches)}, one_process(8))


def test_the_norm_of_bf16_gradients_does_not_depend_on_the_partition(tmp_path: Path) -> None:
    """Case L4: squares are summed in fp64, so even the last digits are the same."""
    norms = []
    for degree in (1, 2, 4):
        tables = {
            "training": {"mixed_precision_param": "bfloat16", "steps": 2},
            "experimental": pipeline(degree, "1F1B", 4),
        }
        norms.append(train(tmp_path, degree, tables)[0]["norms"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-9)
    assert norms[2] == pytest.approx(norms[0], rel=1e-9)


def test_replicas_equal_one_process(tmp_path: Path) -> None:
    """Case L5: replicas divide the gradient twice."""
    tables = {"training": {"batch_size": 4, "data_parallel_replicate_degree": 2}}
    check(tmp_path, 2, tables, one_process(8))


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B"])
def test_fsdp_with_pipeline_equals_one_process(tmp_path: Path, schedule: str) -> None:
    """Also case P6: pipeline 2 x shard 2 starts, and makes all its steps within a minute."""
    tables = {"training": {"batch_size": 4}, "experimental": pipeline(2, schedule, 3)}
    assert_same_run(one_process(8), train(tmp_path, 4, tables, timeout=60))


def test_accumulation_with_fsdp_equals_one_large_batch(tmp_path: Path) -> None:
    """Case L1: accumulated gradients are scaled again at each of 4 steps."""
    tables = {"training": {"batch_size": 1, "global_batch_size": 8}}
    check(tmp_path, 2, tables, one_process(8))


def test_accumulation_with_pipeline_equals_one_large_batch(tmp_path: Path) -> None:
    """Case P15: pipeline with accumulation, 3 steps of 2 microbatches."""
    tables = {
        "training": {"batch_size": 4, "global_batch_size": 12},
        "experimental": pipeline(2, "1F1B", 2),
    }
    check(tmp_path, 2, tables, one_process(8, 12))


def test_initial_parameters_do_not_depend_on_the_layout_but_on_the_seed(tmp_path: Path) -> None:
    tables = {"experimental": pipeline(2, "1F1B"), "training": {"seed": 12, "steps": 1}}
    other = merged(train(tmp_path, 2, tables), "initial")
    expected = merged(one_process(8), "initial")
    assert other.keys() == expected.keys()
    assert any((other[name] != expected[name]).any() for name in expected)


def test_split_points_of_uneven_stages_change_nothing(tmp_path: Path) -> None:
    points = ("layers.1", "layers.5", "layers.6")
    tables = {"experimental": pipeline(2, "Interleaved1F1B", 3, pipeline_parallel_split_points=points)}
    check(tmp_path, 2, tables, one_process(8))
