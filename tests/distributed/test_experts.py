"""Experts spread over ranks compute what they compute on one, whichever tokens come to which rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.layers.moe import Experts
from parallelisms.data import Precision, shard_data_parallel
from parallelisms.expert import apply_expert_parallelism
from parallelisms.layout import EXPERT_SHARD, FSDP, REPLICATE, Layout
from parallelisms.mesh import build_meshes
from tests.distributed.program import pipeline, tiny, values
from tests.distributed.program import run as run_program
from tests.distributed.ranks import run_ranks
from trainer.gradients import local_norm_squared

E, D = 8, 12

# Of each rank, how many rows it has for each expert.
COUNTS = {
    "equally many": [[2] * E] * 4,
    "all kinds": [[3, 0, 1, 7, 0, 2, 2, 1], [0, 0, 0, 0, 5, 0, 0, 0], [1] * E, [0, 9, 0, 0, 0, 0, 0, 3]],
    "all to one expert": [[6, 0, 0, 0, 0, 0, 0, 0]] * 4,  # of each group all ranks but the first get nothing
    "two ranks have none": [[0] * E, [1] * E, [2] * E, [0] * E],
}


class Layers(nn.Module):
    """As a stage: a layer whose forward is its experts'."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"0": Layer(hidden)})

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        return self.layers["0"](x, counts)


class Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(1))
        self.experts = Experts(E, D, hidden)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        return self.experts(x * self.scale, counts)


def fill(module: nn.Module) -> None:
    """The same values on all ranks, whatever each holds."""
    for name, parameter in module.named_parameters():
        whole = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
        if hasattr(parameter, "device_mesh"):
            mesh, placements = parameter.device_mesh, parameter.placements
            whole = dist.tensor.distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
            parameter = parameter.to_local()
        parameter.detach().copy_(whole)


def rows_of(rank: int, counts: list[int]) -> Tensor:
    return torch.randn(sum(counts), D, generator=torch.Generator().manual_seed(rank)).requires_grad_()


def run(module: nn.Module, rank: int, counts: list[int]) -> tuple[Tensor, Tensor | None]:
    """Output and gradient of the input, of a loss that weighs every number differently."""
    x = rows_of(rank, counts)
    y = module(x, torch.tensor(counts))
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(rank + 100))
    (y * weights).sum().backward()
    return y.detach(), x.grad


def spread(rank: int, layout: Layout, hidden: int) -> list[dict[str, Any]]:
    """Outputs and gradients of this rank, and the whole gradients of all parameters, for each of COUNTS."""
    meshes = build_meshes(layout, "cpu")
    assert meshes.experts is not None
    with torch.device("meta"):
        stage = Layers(hidden)
    apply_expert_parallelism(stage, meshes.experts)
    shard_data_parallel(
        stage,
        meshes.parameters[REPLICATE, FSDP],
        Precision(),
        reshard_after_forward=True,
        experts_mesh=meshes.experts[REPLICATE, EXPERT_SHARD],
    )
    stage.to_empty(device="cpu")
    fill(stage)
    held = sum(p.to_local().numel() for p in stage.layers["0"].experts._parameters.values())
    results = []
    for counts in COUNTS.values():
        output, gradient = run(stage, rank, counts[rank])
        norm = local_norm_squared(stage.parameters(), torch.device("cpu"))
        dist.all_reduce(norm)
        gradients = {name: p.grad.full_tensor() for name, p in stage.named_parameters() if p.grad is not None}
        stage.zero_grad()
        results.append({"output": output, "input": gradient, "norm": norm, "held": held, **gradients})
    return results


@pytest.mark.parametrize("hidden", [20, pytest.param(6, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(shard=4, expert=4),
        Layout(shard=4, expert=2),
        Layout(replicate=2, shard=2, expert=2),
    ],
    ids=["four ranks", "two ranks, sharded", "two ranks, replicated"],
)
def test_spread_experts_compute_the_same(layout: Layout, hidden: int) -> None:
    """With a grouped product and without: rows of 6 features are no multiple of 16 bytes."""
    one = Layers(hidden)
    fill(one)
    by_rank = run_ranks(spread, 4, layout, hidden)
    for position, (name, counts) in enumerate(COUNTS.items()):
        expected = [run(one, rank, counts[rank]) for rank in range(4)]
        norm = sum(p.grad.square().sum() for p in one.parameters() if p.grad is not None)
        for (output, gradient), results in zip(expected, by_rank, strict=True):
            result = {key: torch.as_tensor(value) for key, value in results[position].items()}
            assert result["held"] == 3 * E * D * hidden // 4 * layout.replicate
            right = {"output": output, "input": gradient, "norm": norm}
            right |= {parameter: value.grad for parameter, value in one.named_parameters()}
            for key, value in right.items():
                assert value is not None
                assert (result[key] - value).norm() <= 1e-5 * value.norm(), (name, key)
        one.zero_grad()


DEEPSEEK = (
    "--model.name deepseek_v3 --model.override.n_experts 8 --model.override.q_lora_rank 16 "
    "--model.override.kv_lora_rank 16 --model.override.expert_hidden 16 --checkpoint.interval 2 "
    "--validation.enable true --validation.freq 1 --validation.steps 2"
)
LAYOUTS = (
    (2, "--experimental.expert_parallel_degree 2 --training.batch_size 4"),
    (1, "--training.batch_size 8"),
    (4, "--experimental.expert_parallel_degree 2 --training.batch_size 2"),
    (4, f"--experimental.expert_parallel_degree 2 {pipeline(2)} --training.batch_size 4"),
)


@pytest.mark.slow
def test_a_checkpoint_of_spread_experts_goes_on_and_validates_in_any_other_layout(tmp_path: Path) -> None:
    """Spread over two ranks, on one, over two groups that share each expert, in a pipeline; biases too."""
    run_program(arguments(tmp_path / "straight", DEEPSEEK, "--training.batch_size 8", steps=8))
    for steps, (ranks, layout) in zip((2, 4, 6, 8), LAYOUTS, strict=True):
        said = run_program(arguments(tmp_path / "changing", DEEPSEEK, layout, steps=steps), ranks)
        assert steps == 2 or f"step-{steps - 2}" in said
    for key in ("loss", "grad_norm", "validation_loss"):
        straight, changing = values(tmp_path / "straight", key), values(tmp_path / "changing", key)
        assert len(straight) == 8
        assert changing == pytest.approx(straight, rel=1e-4)


def arguments(folder: Path, *more: str, steps: int) -> list[str]:
    """Of a tiny model, but for its heads of keys and values: DeepSeek-V3 has as many as of queries."""
    given = tiny(folder, *more, steps=steps)
    position = given.index("--model.override.n_kv_heads")
    return given[:position] + given[position + 2 :]
