"""Masked documents: the same run in every layout, and the loss is that of each document alone."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.registry import family
from tests.distributed.program import pipeline, run, tiny, values
from tests.distributed.training_run import Tables, assert_same_run, configuration, train
from trainer.data.build import build_loader
from trainer.data.loader import IGNORE
from trainer.data.tokenizer import load_tokenizer
from trainer.plan.plan import make_plan


@cache
def documents() -> Path:
    """A folder of short texts; the longest is longer than a sequence."""
    folder = Path(mkdtemp())
    for number in range(300):
        (folder / f"{number:03d}.txt").write_text("abcdefgh"[number % 8] * (number * 7 % 9) + f" {number}")
    return folder


def masked(more: Tables | None = None) -> Tables:
    tables = {name: dict(keys) for name, keys in (more or {}).items()}
    training = {"dataset_path": str(documents()), **tables.get("training", {})}
    return {**tables, "training": training, "data": {"mask_documents": True}}


@cache
def one_process() -> list[dict[str, Any]]:
    return train(Path(mkdtemp()), 1, masked())


def test_the_loss_of_packed_documents_is_that_of_each_document_alone(tmp_path: Path) -> None:
    config = configuration(documents(), masked())
    model = family(config.model.name).build(make_plan(config, 1).sizes)
    model.load_state_dict(
        {name: torch.as_tensor(value) for name, value in one_process()[0]["initial"].items()}
    )
    loader = build_loader(config, load_tokenizer("byte"), data_rank=0, data_ranks=1)
    batch = next(loader)
    loader.close()
    assert batch.documents is not None
    total, counted, alone = torch.zeros(()), 0, 0
    with torch.no_grad():
        for tokens, labels, row in zip(batch.tokens, batch.labels, batch.documents, strict=True):
            lengths = row.unique_consecutive(return_counts=True)[1].tolist()
            for document, wanted in zip(tokens.split(lengths), labels.split(lengths), strict=True):
                total += loss_of(model(document[None])[0], wanted)
                counted += int((wanted != IGNORE).sum())
                alone += 1
    assert alone > 2 * len(batch.tokens)
    assert one_process()[0]["losses"][0] == pytest.approx(float(total) / counted, rel=1e-5)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")


def test_masking_makes_a_difference(tmp_path: Path) -> None:
    seen = train(tmp_path, 1, {"training": {"dataset_path": str(documents())}})
    assert seen[0]["losses"][0] != pytest.approx(one_process()[0]["losses"][0], rel=1e-3)


def test_a_pipeline_of_sharded_stages_equals_one_process(tmp_path: Path) -> None:
    interleaved = {
        "pipeline_parallel_degree": 2,
        "pipeline_parallel_schedule": "Interleaved1F1B",
        "pipeline_parallel_microbatches": 3,
    }
    tables = masked({"training": {"batch_size": 4}, "experimental": interleaved})
    assert_same_run(one_process(), train(tmp_path, 4, tables))


def test_a_pipeline_validates_masked_documents_like_one_process(tmp_path: Path) -> None:
    options = (
        f"--data.mask_documents true --training.dataset_path {documents()} --training.steps 1 --validation.steps 2",
        "--validation.enable true --validation.batch_size 8 --checkpoint.enable_checkpoint false",
    )
    run(tiny(tmp_path / "1", *options), 1)
    run(tiny(tmp_path / "2", *options, pipeline(2, "1F1B", 3)), 2)
    (alone,), (staged,) = (values(tmp_path / ranks, "validation_loss") for ranks in "12")
    assert staged == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize(
    "tables",
    [
        {"training": {"batch_size": 4}},
        {"training": {"batch_size": 4}, "activation_checkpoint": {"mode": "full"}},
        {"experimental": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "ZB-H1"}},
        {"training": {"tensor_parallel_degree": 2}},
        {"experimental": {"context_parallel_degree": 2}},
        {"experimental": {"context_parallel_degree": 2, "context_parallel_rotate_method": "ulysses"}},
    ],
    ids=["shards", "shards, computed again", "split backward", "tensor", "context", "context by heads"],
)
@pytest.mark.slow
def test_other_layouts_equal_one_process(tmp_path: Path, tables: Tables) -> None:
    assert_same_run(one_process(), train(tmp_path, 2, masked(tables)))
