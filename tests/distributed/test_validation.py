"""Validation: the loss on held-out data is that of one process, in every layout, whatever training does beside it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from tests.distributed.program import pipeline, rows, run, tiny, values

EVERY_STEP = (
    "--validation.enable true --validation.freq 1 --validation.steps 2 --checkpoint.enable_checkpoint false"
)


@cache
def one_process() -> list[float]:
    folder = Path(mkdtemp())
    run(tiny(folder, EVERY_STEP, "--training.batch_size 8 --validation.batch_size 8"))
    return values(folder, "validation_loss")


def test_the_validation_loss_falls_with_training_and_comes_after_every_step() -> None:
    losses = one_process()
    assert len(losses) == 4
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble", "Interleaved1F1B"])
def test_two_pipeline_ranks_validate_like_one_process(tmp_path: Path, schedule: str) -> None:
    """Case P7: evaluation on the last rank only hangs. Training steps lie between the validations."""
    run(tiny(tmp_path, EVERY_STEP, pipeline(2, schedule, 3), "--training.batch_size 8"), 2)
    assert values(tmp_path, "validation_loss") == pytest.approx(one_process(), rel=1e-5)


def test_pipeline_with_sharding_validates_like_one_process(tmp_path: Path) -> None:
    """Case P7."""
    run(tiny(tmp_path, EVERY_STEP, pipeline(2)), 4)
    assert values(tmp_path, "validation_loss") == pytest.approx(one_process(), rel=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_accumulation_does_not_change_the_validation_loss(tmp_path: Path, ranks: int) -> None:
    """Case L2: validation loss divided by accumulation steps. Here 4 on one process and with a pipeline."""
    batches = "--training.batch_size 2 --training.global_batch_size 8 --validation.batch_size 8"
    run(tiny(tmp_path, EVERY_STEP, batches, pipeline(ranks)), ranks)
    assert values(tmp_path, "validation_loss") == pytest.approx(one_process(), rel=1e-5)


def test_validation_does_not_change_training(tmp_path: Path) -> None:
    run(tiny(tmp_path / "with", EVERY_STEP, pipeline(2)), 2)
    run(tiny(tmp_path / "without", pipeline(2), "--checkpoint.enable_checkpoint false"), 2)
    training = [row for row in rows(tmp_path / "with") if "loss" in row]
    assert training == rows(tmp_path / "without")


def test_other_lengths_and_batches_are_validated_and_the_last_step_is(tmp_path: Path) -> None:
    other = "--checkpoint.enable_checkpoint false --validation.seq_len 16 --validation.batch_size 3 --validation.freq 3 --validation.enable true"
    run(tiny(tmp_path / "2", other, pipeline(2)), 2)
    run(tiny(tmp_path / "1", other), 1)
    found = [row for row in rows(tmp_path / "2") if "validation_loss" in row]
    assert [row["step"] for row in found] == [3, 4]
    assert values(tmp_path / "2", "validation_loss") == pytest.approx(
        values(tmp_path / "1", "validation_loss"), rel=1e-5
    )


@cache
def _sets() -> str:
    """A text whose last batch is not full, and conversations of which only the answers count."""
    folder = Path(mkdtemp())
    (folder / "held_out.txt").write_text("What was not trained on. " * 19)
    talks = [{"prompt": f"{n} and {n}?", "completion": str(2 * n)} for n in range(21)]
    (folder / "talks.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    sets = (("text", folder / "held_out.txt"), ("chat", folder / "talks.jsonl"))
    tables = (f'{{name="{name}",dataset="{name}",dataset_path="{path}",steps=-1}}' for name, path in sets)
    every = "--validation.enable true --validation.freq 2 --checkpoint.enable_checkpoint false"
    return f"{every} --training.global_batch_size 8 --validation.sets [{','.join(tables)}]"


@cache
def _sets_by_one_process() -> list[list[float]]:
    return _losses_of_sets(Path(mkdtemp()), "", 1)


def _losses_of_sets(folder: Path, layout: str, ranks: int) -> list[list[float]]:
    run(tiny(folder, _sets(), layout), ranks)
    return [values(folder, f"validation_loss{name}") for name in ("", "/text", "/chat")]


@pytest.mark.parametrize(("layout", "ranks"), [("", 2), (pipeline(2), 2), (pipeline(2, "ZBVZeroBubble"), 4)])
def test_several_sets_are_validated_whole_like_by_one_process(
    tmp_path: Path, layout: str, ranks: int
) -> None:
    """Case D9."""
    one, found = _sets_by_one_process(), _losses_of_sets(tmp_path, layout, ranks)
    assert [len(losses) for losses in found] == [2, 2, 2]
    for losses, expected in zip(found, one, strict=True):
        assert losses == pytest.approx(expected, rel=1e-5)
    whole, text, chat = one
    assert all(min(pair) < mean < max(pair) for mean, *pair in zip(whole, text, chat, strict=True))


@pytest.mark.slow
def test_context_ranks_validate_other_lengths_like_one_process(tmp_path: Path) -> None:
    """Documents end within the part of one rank and within that of another."""
    other = "--checkpoint.enable_checkpoint false --validation.seq_len 24 --validation.freq 2 --validation.enable true --data.mask_documents true"
    ring = "--experimental.context_parallel_degree 2 --experimental.context_parallel_rotate_method alltoall"
    run(tiny(tmp_path / "2", other, ring), 2)
    run(tiny(tmp_path / "1", other), 1)
    one = values(tmp_path / "1", "validation_loss")
    assert len(one) == 2
    assert values(tmp_path / "2", "validation_loss") == pytest.approx(one, rel=1e-5)
