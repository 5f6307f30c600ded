"""Case P10: an output that is tied to an embedding of another stage; both stages hold the matrix."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from models.tied import MATRIX
from tests.distributed.program import pipeline, run, tiny, values
from tests.distributed.ranks import run_ranks
from tests.distributed.training_run import (
    Tables,
    assert_same_run,
    configuration,
    trainer_of,
    write_corpus,
)
from trainer.checkpoint.state import optimizer_tensors
from trainer.config.schema import Config

ROWS = 259  # of the matrix: not shared evenly by any number of ranks
DIVISIBLE_ROWS = 260  # as tensor parallelism needs


def train_steps(rank: int, config: Config, world_size: int, record: str) -> dict[str, Any]:
    """What `assert_same_run` compares, and every copy of the matrix on this rank with its optimizer state."""
    with trainer_of(rank, config, world_size, Path(record)) as trainer:
        gradients: list[dict[str, Any]] = []
        trainer.optimizer.register_step_pre_hook(
            lambda *_: gradients.append({n: whole(p.grad) for n, p in trainer.parameters})
        )
        initial = {name: whole(parameter) for name, parameter in trainer.parameters}
        results = [trainer.loop.train_step() for _ in range(config.training.steps)]
        copies = []
        for part in trainer.pipeline.parts:
            state = {"value": dict(part.named_parameters()), **optimizer_tensors([part], trainer.optimizer)}
            state.update(state.pop("value"))
            copies.append({name: whole(value) for name, value in state.items() if name.startswith(MATRIX)})
        return {
            "losses": [result.loss for result in results],
            "norms": [result.grad_norm for result in results],
            "initial": initial,
            "gradients": gradients,
            "copies": [copy for copy in copies if copy],
        }


def whole(tensor: Any) -> Any:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def train(folder: Path, world_size: int, tables: Tables, vocab_size: int) -> list[dict[str, Any]]:
    model = {"override": {"tie_embeddings": True, "vocab_size": vocab_size}}
    config = configuration(write_corpus(folder), {"model": model, **tables})
    record = str(folder / "failure.json")
    return run_ranks(train_steps, world_size, config, world_size, record, timeout=90, process_group=False)


@cache
def one_process(vocab_size: int) -> list[dict[str, Any]]:
    return train(Path(mkdtemp()), 1, {}, vocab_size)


def layout(schedule: str, degree: int = 2, microbatches: int | None = None, **training: Any) -> Tables:
    keys = {"pipeline_parallel_degree": degree, "pipeline_parallel_schedule": schedule}
    more = {} if microbatches is None else {"pipeline_parallel_microbatches": microbatches}
    return {"experimental": {**keys, **more}, "training": training}


LAYOUTS = {
    "pipeline 2": (2, layout("1F1B", microbatches=3)),
    "split backward": (2, layout("ZB-H1", microbatches=3)),
    "both stages on rank 0 of 4": (4, layout("DualPipeV", 4, microbatches=8)),
    "shards": (4, layout("1F1B", batch_size=4)),
    "replicas": (4, layout("GPipe", batch_size=4, data_parallel_replicate_degree=2)),
    "shards and accumulation": (4, layout("ZBVZeroBubble", batch_size=2, global_batch_size=8)),
    "accumulation": (2, layout("1F1B", batch_size=2, global_batch_size=8)),
    "fused loss": (2, layout("1F1B", fused_loss=True)),
    "tensor": (4, layout("ZBVZeroBubble", microbatches=4, tensor_parallel_degree=2)),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "pipeline 2" else pytest.mark.slow) for name in LAYOUTS]
)
def test_it_trains_like_one_process_and_the_copies_stay_equal_bit_for_bit(tmp_path: Path, name: str) -> None:
    """Case P10: gradients are those of both uses, the norm counts them once, no copy goes a way of its own."""
    world_size, tables = LAYOUTS[name]
    rows = DIVISIBLE_ROWS if name == "tensor" else ROWS
    results = train(tmp_path, world_size, tables, rows)
    assert_same_run(one_process(rows), results)
    copies = [copy for result in results for copy in result["copies"]]
    assert len(copies) == 2 * world_size // tables["experimental"]["pipeline_parallel_degree"]
    for copy in copies:
        assert copy.keys() == {MATRIX, f"{MATRIX}.exp_avg", f"{MATRIX}.exp_avg_sq", f"{MATRIX}.step"}
        for quantity, value in copy.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(copies[0][quantity])), quantity


@pytest.mark.slow
def test_a_checkpoint_of_any_layout_goes_on_in_any_other(tmp_path: Path) -> None:
    """Case P10: saved once, loaded into both copies, with the optimizer's state."""
    tied = "--model.override.tie_embeddings true --checkpoint.interval 2 --optimizer.lr 1e-2"
    run(tiny(tmp_path / "straight", tied, steps=8))
    layouts = [("", 1), (pipeline(2), 2), (pipeline(2, "ZBVZeroBubble", 4), 2), ("", 1)]
    for steps, (arguments, ranks) in zip((2, 4, 6, 8), layouts, strict=True):
        said = run(tiny(tmp_path / "changing", tied, arguments, steps=steps), ranks)
        assert steps == 2 or f"step-{steps - 2}" in said
    for key, digits in (("loss", 1e-5), ("grad_norm", 1e-4)):
        assert values(tmp_path / "changing", key) == pytest.approx(
            values(tmp_path / "straight", key), rel=digits
        )
    assert len(values(tmp_path / "changing", "loss")) == 8
