"""Biases of experts: which way they move, what a skipped step does, and that a checkpoint of any layout has them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.registry import family
from tests.distributed.program import pipeline, rows, run
from tests.distributed.ranks import run_ranks
from tests.distributed.tiny_families import FAMILIES, model_table
from tests.distributed.training_run import configuration, trainer_of, write_corpus
from trainer.checkpoint.storage import CheckpointReader
from trainer.expert_balance import ExpertCounts, balancing_of

ROUTER = "layers.3.moe.router"


def test_the_load_is_that_of_the_busiest_expert_over_the_mean() -> None:
    counts = ExpertCounts(torch.tensor([[2, 2, 2, 2], [8, 0, 0, 0], [3, 1, 0, 0]]), (4, 4, 2))
    load = counts.load()
    assert load.worst == 4.0
    assert load.mean == pytest.approx((1 + 4 + 1.5) / 3)


def test_strengths_are_those_of_the_family_unless_they_are_configured(tmp_path: Path) -> None:
    def of(name: str, **training: Any) -> tuple[float, float]:
        config = configuration(tmp_path, {"model": model_table(name), "training": training})
        found = balancing_of(config, family(name).sizes["debug"])
        return found.rate, found.loss

    assert of("deepseek_v3") == (0.001, 0.0001)
    assert of("qwen3_moe") == (0.0, 0.001)
    assert of("qwen3") == (0.0, 0.0)
    assert of("deepseek_v3", load_balance_rate=0.0, load_balance_loss=0.5) == (0.0, 0.5)


def _spoil_the_second_step(rank: int, folder: str) -> list[dict[str, Any]]:
    """The bias and the counts after each of three steps, of which the second has an infinite gradient."""
    tables = {"model": model_table("deepseek_v3"), "training": {"load_balance_rate": 0.25}}
    config = configuration(Path(folder) / "corpus.txt", tables)
    seen = []
    with trainer_of(rank, config, 1, Path(folder) / "failure.json") as trainer:
        (part,) = trainer.pipeline.parts
        router = part.get_submodule(ROUTER)
        for step in range(3):
            if step == 1:
                handle = part.get_parameter("norm.weight").register_hook(lambda g: g * torch.inf)
            result = trainer.loop.train_step()
            if step == 1:
                handle.remove()
            seen.append(
                {
                    "skipped": result.skipped,
                    "bias": router.expert_bias.clone(),
                    "left": int(router.tokens_per_expert.sum()),
                    "counts": None
                    if result.expert_counts is None
                    else result.expert_counts.tokens[2].clone(),
                }
            )
    return seen


def test_biases_move_against_the_load_and_not_in_a_skipped_step(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    (seen,) = run_ranks(_spoil_the_second_step, 1, str(tmp_path), process_group=False)
    first, second, third = seen
    assert [step["skipped"] for step in seen] == [False, True, False]
    tokens = 8 * 16 * 2  # sequences, their length, experts per token
    bias = np.zeros(8)
    for step in (first, third):
        counts = np.asarray(step["counts"])
        assert counts.sum() == tokens
        bias = bias + 0.25 * np.sign(counts.mean() - counts)
        np.testing.assert_array_equal(step["bias"], bias)
    np.testing.assert_array_equal(second["bias"], first["bias"])
    assert second["counts"] is None
    assert [step["left"] for step in seen] == [0, 0, 0]


def arguments(folder: Path, *more: str, steps: int) -> list[str]:
    override = " ".join(f"--model.override.{key} {value}" for key, value in FAMILIES["deepseek_v3"].items())
    corpus = write_corpus(folder)
    text = (
        f"--model.name deepseek_v3 --model.tokenizer_path byte {override} --training.dataset text "
        f"--training.dataset_path {corpus} --training.batch_size 4 --training.seq_len 32 --training.steps {steps} "
        f"--training.warmup_steps 2 --metrics.log_freq 1 --checkpoint.keep_latest_k 0 --job.dump_folder {folder}"
    )
    return [*text.split(), *" ".join(more).split()]


@pytest.mark.slow
def test_a_checkpoint_of_a_pipeline_goes_on_sharded_with_its_biases(tmp_path: Path) -> None:
    """Four steps at once, and as a pipeline of which two sharded ranks do the last two again."""
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    straight.mkdir()
    resumed.mkdir()
    run(arguments(straight, "--checkpoint.interval 2", steps=4), 1)
    run(arguments(resumed, pipeline(2), "--checkpoint.interval 2", steps=4), 2)
    shutil.rmtree(resumed / "checkpoint" / "step-4")
    run(arguments(resumed, "--training.batch_size 2 --checkpoint.interval 2", steps=4), 2)
    biases = []
    for folder in (straight, resumed):
        read = {f"{ROUTER}.expert_bias": torch.full((8,), torch.nan)}
        CheckpointReader(folder / "checkpoint" / "step-4").read_into("model", read)
        biases.append(read[f"{ROUTER}.expert_bias"])
    assert biases[0].abs().max() > 0
    assert torch.equal(biases[0], biases[1])
    for ours, theirs in zip(rows(resumed), rows(straight), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["expert_load_worst"] == pytest.approx(theirs["expert_load_worst"])
