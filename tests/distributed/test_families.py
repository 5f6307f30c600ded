"""Each family is the same training run in every layout: losses, norms, all gradients, and the biases of experts."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest

from tests.distributed.tiny_families import FAMILIES, model_table
from tests.distributed.training_run import assert_same_run, merged, train

MOE = ("qwen3_moe", "deepseek_v3")


def quick(one: str, families: Iterable[str]) -> list[Any]:
    """One of the families; the others are slow."""
    return [pytest.param(name, marks=() if name == one else pytest.mark.slow) for name in families]


def run(folder: Path, world_size: int, family: str, **tables: Any) -> list[dict[str, Any]]:
    return train(folder, world_size, {"model": model_table(family), **tables})


@cache
def one_process(family: str) -> list[dict[str, Any]]:
    """The reference: the whole global batch in one process, one microbatch."""
    return run(Path(mkdtemp()), 1, family)


def check(folder: Path, world_size: int, family: str, **tables: Any) -> None:
    one, many = one_process(family), run(folder, world_size, family, **tables)
    assert_same_run(one, many)
    expected, actual = merged(one, "buffers"), merged(many, "buffers")
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)


def pipeline(degree: int, schedule: str, microbatches: int = 4) -> dict[str, Any]:
    return {
        "pipeline_parallel_degree": degree,
        "pipeline_parallel_schedule": schedule,
        "pipeline_parallel_microbatches": microbatches,
    }


@pytest.mark.parametrize("family", quick("deepseek_v3", FAMILIES))
def test_a_pipeline_of_four_interleaved_equals_one_process(tmp_path: Path, family: str) -> None:
    check(tmp_path, 4, family, experimental=pipeline(4, "Interleaved1F1B"))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("degree", "schedule"),
    [(2, "GPipe"), (2, "1F1B"), (2, "Interleaved1F1B"), (4, "GPipe"), (4, "1F1B"), (2, "ZBVZeroBubble")],
)
def test_pipelines_equal_one_process(tmp_path: Path, family: str, degree: int, schedule: str) -> None:
    check(tmp_path, degree, family, experimental=pipeline(degree, schedule, 3))


@pytest.mark.parametrize("family", quick("deepseek_v3", MOE))
def test_accumulation_and_recomputation_equal_one_process(tmp_path: Path, family: str) -> None:
    """The tokens of all steps are counted, and those of a layer that is computed again are counted once."""
    accumulation = {"batch_size": 2, "global_batch_size": 8}
    check(tmp_path, 1, family, training=accumulation, activation_checkpoint={"mode": "full"})


@pytest.mark.slow
@pytest.mark.parametrize("family", MOE)
def test_sharded_stages_equal_one_process(tmp_path: Path, family: str) -> None:
    """Experts are sharded over ranks, whose tokens are counted together; weights come later than inputs."""
    check(
        tmp_path,
        4,
        family,
        training={"batch_size": 2, "global_batch_size": 8},
        experimental=pipeline(2, "ZBVZeroBubble", 2),
        activation_checkpoint={"mode": "full"},
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", MOE)
def test_replicas_equal_one_process(tmp_path: Path, family: str) -> None:
    check(tmp_path, 2, family, training={"batch_size": 4, "data_parallel_replicate_degree": 2})


def test_biases_move_by_the_rate_against_the_load() -> None:
    biases = {n: b for n, b in merged(one_process("deepseek_v3"), "buffers").items() if "expert_bias" in n}
    assert len(biases) == FAMILIES["deepseek_v3"]["n_layers"] - 1
    steps = 3
    for bias in biases.values():
        moves = np.round(np.asarray(bias, np.float64) / 0.001)
        np.testing.assert_allclose(bias, moves * 0.001, atol=1e-6)
        assert 0 < np.abs(moves).max() <= steps
        assert moves.min() < 0 < moves.max()  # some had more than the mean, some less


@pytest.mark.parametrize("family", MOE)
def test_the_balance_loss_changes_the_gradients_but_not_what_is_called_the_loss(
    tmp_path: Path, family: str
) -> None:
    with_loss = run(tmp_path, 1, family, training={"steps": 1, "load_balance_loss": 1.0})[0]
    without = run(tmp_path, 1, family, training={"steps": 1, "load_balance_loss": 0.0})[0]
    assert with_loss["losses"] == without["losses"]
    gates = [name for name in without["final"] if name.endswith("router.gate.weight")]
    for gate in gates:
        a, b = (np.asarray(result["gradients"][0][gate]) for result in (with_loss, without))
        assert np.linalg.norm(a - b) > 0.1 * np.linalg.norm(b)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_it_learns_from_the_text_that_ships_with_python(tmp_path: Path, family: str) -> None:
    corpus = {"dataset": "python_docs", "dataset_path": None, "steps": 40, "seq_len": 64}
    losses = run(tmp_path, 1, family, training=corpus, optimizer={"lr": 1e-2})[0]["losses"]
    assert losses[0] > 5.5  # as of 258 equally likely bytes
    assert sum(losses[-5:]) / 5 < 3.5
