"""Training from a token store is training from its text: the same metrics, on any number of data-parallel ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.stores import make_store
from tests.distributed.program import Forked, rows, run, tiny
from trainer.data.store_format import tokens_file

STEPS = 3


@pytest.mark.slow
def test_two_ranks_on_a_store_log_what_one_process_logs_on_its_text(tmp_path: Path) -> None:
    run([*tiny(tmp_path / "text", steps=STEPS), "--training.batch_size", "8"])
    run(_on_store(tmp_path / "store"), 2)
    expected, found = rows(tmp_path / "text"), rows(tmp_path / "store")
    assert len(found) == STEPS
    for row, reference in zip(found, expected, strict=True):
        assert row["loss"] == pytest.approx(reference["loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-4)


def test_a_token_outside_of_the_vocabulary_ends_the_run_with_its_place(tmp_path: Path) -> None:
    arguments = _on_store(tmp_path)
    file = tokens_file(tmp_path / "made", 0)
    file.write_bytes(b"\xff\xff" * (file.stat().st_size // 2))
    job = Forked.start(arguments, 1)
    assert job.wait() == [4]
    assert "of epoch 0 holds a token 65535, the tokenizer has 258" in job.said


def _on_store(folder: Path) -> list[str]:
    arguments = tiny(folder, steps=STEPS)
    make_store(folder / "made", "text", folder / "corpus.txt")
    arguments[arguments.index("--training.dataset") + 1] = "store"
    arguments[arguments.index("--training.dataset_path") + 1] = str(folder / "made")
    return arguments
