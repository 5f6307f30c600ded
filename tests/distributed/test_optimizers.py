"""The update is the same in every layout, also of optimizers that need whole matrices."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from parallelisms.whole_matrices import on_whole_matrices, part_of
from tests.distributed.ranks import run_ranks
from tests.distributed.test_parity import pipeline
from tests.distributed.tiny_families import FAMILIES
from tests.distributed.training_run import assert_same_run, merged, train

MUON = {"name": "Muon", "lr": 1e-3}


def family_table(name: str) -> dict[str, Any]:
    return {"name": name, "flavor": "debug", "override": dict(FAMILIES[name])}


@cache
def one_process() -> list[dict[str, Any]]:
    return train(Path(mkdtemp()), 1, {"training": {"batch_size": 8}, "optimizer": MUON})


def check(folder: Path, world_size: int, **tables: dict[str, Any]) -> None:
    results = train(folder, world_size, {"optimizer": MUON, **tables})
    assert_same_run(one_process(), results)
    expected, actual = merged(one_process(), "final"), merged(results, "final")
    for name, value in expected.items():
        torch.testing.assert_close(torch.as_tensor(actual[name]), torch.as_tensor(value), rtol=0, atol=2e-5)


def test_muon_with_sharded_matrices_equals_one_process(tmp_path: Path) -> None:
    check(tmp_path, 2, training={"batch_size": 4})


@pytest.mark.slow
def test_muon_with_replicas_tensor_parallel_equals_one_process(tmp_path: Path) -> None:
    training = {"batch_size": 4, "data_parallel_replicate_degree": 2, "tensor_parallel_degree": 2}
    check(tmp_path, 4, training=training)


@pytest.mark.slow
def test_muon_with_pipeline_fsdp_and_tensor_parallel_equals_one_process(tmp_path: Path) -> None:
    training = {"batch_size": 4, "tensor_parallel_degree": 2}
    check(tmp_path, 8, training=training, experimental=pipeline(2, "1F1B", 2))


@pytest.mark.slow
def test_muon_with_experts_spread_over_ranks_equals_one_process(tmp_path: Path) -> None:
    """Of latent attention and experts: matrices cut by FSDP and by tensor parallelism, stacks cut by expert."""
    tables = {"model": family_table("deepseek_v3"), "optimizer": MUON}
    training = {"batch_size": 4, "tensor_parallel_degree": 2}
    experimental = {"expert_parallel_degree": 2}
    many = train(tmp_path, 4, {**tables, "training": training, "experimental": experimental})
    assert_same_run(train(tmp_path, 1, tables), many)


# Whole matrices

SHAPES = ((5, 7), (16, 3), (1, 4), (3, 4, 6), (9, 2))


def numbered(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + 1


def ranked(whole: Tensor) -> Tensor:
    """Something that needs all of a matrix: its sum, and every element's place in it."""
    return whole / whole.sum(dim=(-2, -1), keepdim=True)


def _on_parts(rank: int, first: str, second: str) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (2, 2))
    kinds: dict[str, Placement] = {"copy": Replicate(), "rows": Shard(-2), "columns": Shard(-1)}
    calls = []

    def counted(whole: Tensor) -> Tensor:
        calls.append(whole.shape)
        return ranked(whole)

    cut = [distribute_tensor(numbered(shape), mesh, (kinds[first], kinds[second])) for shape in SHAPES]
    parts = [part_of(tensor, tensor.to_local()) for tensor in cut]
    results = on_whole_matrices(parts, counted)
    whole = []
    for tensor, result in zip(cut, results, strict=True):
        whole.append(type(tensor).from_local(
            result, mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride()
        ).full_tensor())  # fmt: skip
    return [torch.tensor(len(calls)), *whole]


@pytest.mark.parametrize(
    ("first", "second", "calls"),
    [("copy", "rows", 10), ("rows", "columns", 5), ("columns", "rows", 5), ("rows", "rows", 5), ("copy", "copy", 20)],
)  # fmt: skip
def test_each_matrix_is_worked_on_whole_once_for_each_copy(first: str, second: str, calls: int) -> None:
    answers = run_ranks(_on_parts, 4, first, second)
    assert sum(int(answer[0]) for answer in answers) == calls
    for answer in answers:
        for result, shape in zip(answer[1:], SHAPES, strict=True):
            torch.testing.assert_close(torch.as_tensor(result), ranked(numbered(shape)))


def _on_experts(rank: int) -> int:
    """Experts that are spread over ranks are whole: nothing is exchanged."""
    mesh = init_device_mesh("cpu", (2,))
    experts = distribute_tensor(numbered((4, 5, 6)), mesh, (Shard(0),))
    part = part_of(experts, experts.to_local())
    (result,) = on_whole_matrices([part], ranked)
    torch.testing.assert_close(result, ranked(numbered((4, 5, 6))[2 * rank : 2 * rank + 2]))
    return len(part.cuts)


def test_a_stack_of_matrices_that_is_cut_between_them_is_not_exchanged() -> None:
    assert run_ranks(_on_experts, 2) == [0, 0]
