"""metrics.jsonl says the same in every layout: loss, gradient norm, learning rate, tokens."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from parallelisms.pipeline.schedules.catalogue import FAMILIES
from tests.distributed.program import pipeline, rows, run, tiny

V_SCHEDULES = [family.name for family in FAMILIES if family.placement == "v"]
BATCH_OF_8 = "--training.batch_size 8 --model.override.n_layers 8 --checkpoint.enable_checkpoint false"


@cache
def one_process() -> list[dict[str, Any]]:
    folder = Path(mkdtemp())
    run(tiny(folder, BATCH_OF_8, steps=3))
    return rows(folder)


def check(folder: Path) -> None:
    expected = one_process()
    assert [row["step"] for row in rows(folder)] == [1, 2, 3]
    for row, reference in zip(rows(folder), expected, strict=True):
        assert row["loss"] == pytest.approx(reference["loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-4)
        assert (row["lr"], row["tokens"], row["skipped"]) == (
            reference["lr"],
            reference["tokens"],
            reference["skipped"],
        )


# The loss is on the last rank, but in V schedules on rank 0, which also holds the first stage.
CASES = [
    ("1F1B", 2),
    ("GPipe", 4),
    *((n, 2) if n == "ZBVZeroBubble" else pytest.param(n, 2, marks=pytest.mark.slow) for n in V_SCHEDULES),
]


@pytest.mark.parametrize(("schedule", "ranks"), CASES)
def test_the_logged_loss_of_a_pipeline_is_that_of_one_process(
    tmp_path: Path, schedule: str, ranks: int
) -> None:
    """Cases P8 (the logged loss is -1 or missing) and L4 (norm over one stage only)."""
    run(tiny(tmp_path, BATCH_OF_8, pipeline(ranks, schedule, 3), steps=3), ranks)
    check(tmp_path)


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [(pipeline(2, "ZBVZeroBubble"), 4), ("--training.data_parallel_replicate_degree 2", 2)],
    ids=["V schedule with shards", "replicas"],
)
def test_the_logged_loss_with_data_parallelism_is_that_of_one_process(
    tmp_path: Path, layout: str, ranks: int
) -> None:
    """Cases P8 and L4."""
    run(tiny(tmp_path, BATCH_OF_8, "--training.batch_size 4", layout, steps=3), ranks)
    check(tmp_path)


def test_the_logged_loss_with_tensor_and_context_parallelism_is_that_of_one_process(tmp_path: Path) -> None:
    """Case L6: ranks of a tensor group have the same tokens, those of a context group others of the same sequences."""
    both = "--training.tensor_parallel_degree 2 --experimental.context_parallel_degree 2"
    run(tiny(tmp_path, BATCH_OF_8, both, steps=3), 4)
    check(tmp_path)
