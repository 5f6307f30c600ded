"""A configured number of epochs ends: all ranks agree on the last step, count it right, and save the state."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.program import rows, run, tiny

ONE_EPOCH = "--data.epochs 1 --training.warmup_steps 0 --training.seq_len 16 --checkpoint.interval 1000"


def corpus(folder: Path, characters: int) -> list[str]:
    """One document of so many bytes, which are the tokens of the byte tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "corpus.txt").write_text("".join(chr(97 + i * i % 23) for i in range(characters)))
    return tiny(folder, ONE_EPOCH, steps=1000)


@pytest.mark.parametrize(
    "rest", [20, pytest.param(0, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.slow)]
)
def test_two_ranks_end_like_one_where_the_last_batch_is_not_full(tmp_path: Path, rest: int) -> None:
    """Cases L3 and D1: of the last batch the second rank has nothing (rest 20), or both have some (100)."""
    characters = 3 * 8 * 16 + rest
    one = corpus(tmp_path / "1", characters)
    run([*one, "--training.batch_size", "8"])
    two = corpus(tmp_path / "2", characters)
    said = run(two, 2)
    expected, found = rows(tmp_path / "1"), rows(tmp_path / "2")
    for row, reference in zip(found, expected, strict=True):
        assert row["loss"] == pytest.approx(reference["loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-4)
    last = found[-1]["step"]
    assert "is used up" in said
    assert (tmp_path / "2" / "checkpoint" / f"step-{last}").is_dir()
    # Started again, there is nothing left to do.
    run(two, 2)
    assert rows(tmp_path / "2") == found
