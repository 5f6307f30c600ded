"""What only a GPU can prove: the program with NCCL is the run of the CPU, in every format and with every kernel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.program import pipeline, tiny, values
from tests.launched import launched
from trainer.config.load import load
from trainer.errors import ExitCode
from trainer.plan.memory import forecast_memory
from trainer.plan.plan import make_plan

DEVICES = torch.cuda.device_count()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(DEVICES == 0, reason="needs a CUDA device"),
]

# Of a width that float8 and flash attention take.
WIDE = (
    "--model.override.dim 256 --model.override.n_heads 4 --model.override.ffn_hidden 512 "
    "--model.override.vocab_size 272 --training.seq_len 128 --optimizer.lr 1e-4"
)
FLOAT32 = "--training.mixed_precision_param float32"
BFLOAT16 = "--training.mixed_precision_param bfloat16"
TENSOR = "--training.tensor_parallel_degree 2"
ASYNC = "--experimental.enable_async_tensor_parallel --training.compile"


def losses(folder: Path, *more: str, ranks: int = 1, **environment: str) -> list[Any]:
    """Of six steps of the program under the launcher."""
    with launched(tiny(folder, WIDE, *more, steps=6), NGPU=str(ranks), **environment) as job:
        code, _, err = job.end(240)
        assert code == ExitCode.DONE, err
    return values(folder, "loss")


@pytest.fixture(scope="module")
def on_the_cpu(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return losses(tmp_path_factory.mktemp("cpu"), FLOAT32, CUDA_VISIBLE_DEVICES="")


def test_one_rank_with_nccl_in_float32_has_the_losses_of_the_cpu(
    tmp_path: Path, on_the_cpu: list[Any]
) -> None:
    assert losses(tmp_path, FLOAT32) == pytest.approx(on_the_cpu, rel=1e-4)


@pytest.mark.parametrize(
    "more",
    [
        "",
        "--training.compile",
        "--model.attention flash",
        "--model.attention flex --data.mask_documents",
        "--activation_checkpoint.mode selective",
        "--activation_checkpoint.mode memory_budget --training.compile",
        "--training.enable_cpu_offload",
        "--checkpoint.async_mode async_with_pinned_mem --checkpoint.interval 2",
    ],
)
def test_bfloat16_has_nearly_the_losses_of_float32(tmp_path: Path, on_the_cpu: list[Any], more: str) -> None:
    if "mask_documents" in more:
        on_the_cpu = losses(tmp_path / "cpu", FLOAT32, "--data.mask_documents", CUDA_VISIBLE_DEVICES="")
    assert losses(tmp_path / "gpu", BFLOAT16, more) == pytest.approx(on_the_cpu, rel=0.01)


@pytest.mark.skipif(
    DEVICES == 0 or torch.cuda.get_device_capability() < (8, 9), reason="needs a device with float8 products"
)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_float8_trains_nearly_as_without_it(tmp_path: Path, on_the_cpu: list[Any], recipe: str) -> None:
    float8 = f"--float8.enable_float8_linear --float8.recipe_name {recipe} --training.compile"
    assert losses(tmp_path, BFLOAT16, float8) == pytest.approx(on_the_cpu, rel=0.03)


def test_the_memory_of_a_run_is_within_the_forecast(tmp_path: Path) -> None:
    """The allocator's peak is above what lives, by its granularity, and never far above what was planned."""
    arguments = tiny(tmp_path, WIDE, "--training.batch_size 32", steps=4)
    with launched(arguments, NGPU="1") as job:
        code, _, err = job.end(240)
        assert code == ExitCode.DONE, err
    planned = forecast_memory(make_plan(load(arguments).config, 1))[0].peak.total
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    measured = max(json.loads(line)["memory_bytes"] for line in lines)
    assert 0.7 * planned < measured < 1.3 * planned


@pytest.mark.skipif(DEVICES < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(
    "more",
    [
        "--training.data_parallel_shard_degree 2",
        TENSOR,
        f"{TENSOR} {ASYNC}",
        "--experimental.context_parallel_degree 2",
        pipeline(2, "ZBVZeroBubble"),
    ],
)
def test_two_ranks_with_nccl_have_nearly_the_losses_of_the_cpu(
    tmp_path: Path, on_the_cpu: list[Any], more: str
) -> None:
    batch = "--training.global_batch_size 4 --training.batch_size 2" if "shard" in more else ""
    assert losses(tmp_path, BFLOAT16, more, batch, ranks=2) == pytest.approx(on_the_cpu, rel=0.01)
