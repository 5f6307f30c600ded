"""Tensor parallelism in the whole program: what is logged, validated and saved; the matrix of layouts has the rest."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from tests.distributed.program import pipeline, rows, run, tiny
from tests.distributed.training_run import train

TENSOR = "--training.tensor_parallel_degree 2"
LOGGED = (
    "--training.mixed_precision_param float32 --training.batch_size 8 --checkpoint.interval 2 "
    "--validation.enable true --validation.freq 2 --validation.steps 2 --validation.batch_size 8"
)


@cache
def one_process() -> Path:
    folder = Path(mkdtemp())
    run(tiny(folder, LOGGED))
    return folder


def assert_same_rows(actual: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [sorted(row) for row in actual] == [sorted(row) for row in expected]
    for row, reference in zip(actual, expected, strict=True):
        for key, value in reference.items():
            assert row[key] == pytest.approx(value, rel=1e-4 if key == "grad_norm" else 1e-5), (row, key)


def continued(saved: Path, folder: Path, arguments: str, ranks: int) -> list[dict[str, Any]]:
    """The rows of a run that goes on from what another saved after step 2."""
    shutil.copytree(saved / "checkpoint" / "step-2", folder / "checkpoint" / "step-2")
    run(tiny(folder, LOGGED, arguments), ranks)
    return rows(folder)


def after_step_2(every: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in every if row["step"] > 2]


def test_what_is_logged_and_validated_is_that_of_one_process_and_what_is_saved_goes_on_there(
    tmp_path: Path,
) -> None:
    """Also case L6 for tensor parallelism alone: each rank computes the loss of the same tokens, and it counts once."""
    run(tiny(tmp_path / "two", LOGGED, TENSOR), 2)
    expected = rows(one_process())
    assert_same_rows(rows(tmp_path / "two"), expected)
    assert_same_rows(continued(tmp_path / "two", tmp_path / "one", "", 1), after_step_2(expected))


@pytest.mark.slow
def test_what_one_process_saved_goes_on_on_tensor_and_pipeline_ranks(tmp_path: Path) -> None:
    layout = f"{TENSOR} {pipeline(2, 'ZBVZeroBubble', 4)}"
    found = continued(one_process(), tmp_path, layout, 4)
    assert_same_rows(found, after_step_2(rows(one_process())))


@pytest.mark.slow
def test_in_bf16_the_losses_are_as_close_as_bf16_is(tmp_path: Path) -> None:
    bf16 = {"mixed_precision_param": "bfloat16"}
    one = train(tmp_path, 1, {"training": bf16})[0]
    two = train(tmp_path, 2, {"training": {**bf16, "tensor_parallel_degree": 2}})[0]
    assert two["losses"] == pytest.approx(one["losses"], rel=2e-2)
    assert two["norms"] == pytest.approx(one["norms"], rel=5e-2)
