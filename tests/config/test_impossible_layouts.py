"""Layouts that cannot be: each is refused before torch is imported, with the reason and the nearest that can be."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.reports import rules_broken
from trainer.config.load import load
from trainer.config.rules.machine import torch_places_experts

PP = "--experimental.pipeline_parallel_"
DP = "--training.data_parallel_"
TP = "--training.tensor_parallel_degree"
CP = "--experimental.context_parallel_"
EP = "--experimental.expert_parallel_degree"
MIXTURE = "--model.name qwen3_moe"

# The arguments; the world size; the reason; the nearest layout that is possible.
IMPOSSIBLE: list[tuple[str, int, str, str]] = [
    (f"{PP}degree 3", 4, "pipeline_parallel_degree 3 does not divide 4 processes", "pipeline_parallel_degree = 2?"),
    (f"{DP}replicate_degree 3", 8, "data_parallel_replicate_degree 3 does not divide 8", "replicate_degree = 2?"),
    (f"{TP} 2 {CP}degree 3 --training.seq_len 96", 8, "does not divide 8 processes", "context_parallel_degree = 2?"),
    (f"{DP}shard_degree 2 {TP} 2", 8, "is not the 8 processes there are", "data_parallel_shard_degree = 4?"),
    (f"{PP}degree 16", 16, "more stages than the model's 8 layers", "allowed: 1 to 8"),
    (f"{PP}degree 8 {PP}schedule Interleaved1F1B", 8, "8 ranks × 2 stages per rank", "at most 8 stages"),
    (f"{PP}degree 4 {PP}split_points layers.2,layers.4", 4, "which 4 ranks cannot share evenly", "3 or 7 points"),
    (f"{PP}degree 2 {PP}microbatches 16", 2, "cannot be cut into so many microbatches", "1 to 8"),
    (f"{TP} 3 --training.seq_len 96", 3, "n_heads 8 is not divisible by 3", "did you mean 2?"),
    (f"{TP} 16", 16, "n_heads 8 is not divisible by 16", "did you mean 8?"),
    (f"{TP} 2 --training.seq_len 33", 2, "is not divisible by tensor_parallel_degree 2", "did you mean 32 or 34?"),
    (f"{CP}degree 4 --training.seq_len 36", 4, "is not divisible into 8 chunks", "did you mean 32 or 40?"),
    (f"{CP}degree 16 {CP}rotate_method ulysses", 16, "cannot divide 8 heads", "context_parallel_degree = 8?"),
    (f"{EP} 2", 2, "llama3 has no experts", "did you mean 1?"),
    (f"{MIXTURE} {EP} 3", 3, "does not divide the 16 experts of a layer", "did you mean 2?"),
    (f"{MIXTURE} {EP} 4 {TP} 4", 8, "does not divide data_parallel_shard_degree 2", "did you mean 2?"),
    (f"{MIXTURE} {EP} 2 {DP}replicate_degree 2", 2, "does not divide data_parallel_shard_degree 1", "did you mean 1?"),
    ("--training.global_batch_size 12", 2, "is no multiple of the 16 sequences of one pass", "did you mean 16?"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "world_size", "reason", "nearest"), IMPOSSIBLE, ids=[case[0] for case in IMPOSSIBLE]
)
def test_an_impossible_layout_is_refused_with_the_reason_and_the_nearest_possible_one(
    arguments: str, world_size: int, reason: str, nearest: str
) -> None:
    """Case O1 is among them: heads that do not divide over tensor ranks."""
    (line,) = rules_broken(*arguments.split(), world_size=world_size)
    assert reason in line
    assert nearest in line


def test_experts_are_spread_only_by_a_torch_that_places_single_parameters(tmp_path: Path) -> None:
    path = tmp_path / "experts.toml"
    path.write_text('[model]\nname = "qwen3_moe"\n[experimental]\nexpert_parallel_degree = 2\n')
    loaded = load(["--config", str(path)])
    (problem,) = torch_places_experts(loaded, "2.11.0+cu130")
    assert "needs torch 2.12 or newer; this is 2.11.0+cu130" in problem.message
    assert list(torch_places_experts(loaded, "2.12.0")) == []
