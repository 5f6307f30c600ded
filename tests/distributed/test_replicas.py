"""What several ranks should hold alike is compared, and the rank that has something else is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor

from tests.distributed.program import Forked, pipeline, run, tiny, values
from trainer.errors import ExitCode
from trainer.loop import Loop, StepResult
from trainer.replicas import checksum

EVERY_2 = "--comm.check_replicas_every 2"
REPLICAS = "--training.data_parallel_replicate_degree"
NORM = "layers.1.attention_norm.weight"


def flip(rank: int, name: str, quantity: str | None = None, step: int = 3) -> Callable[[int], None]:
    """In a step, the last bit of the first number of a parameter of one rank changes, or of its optimizer state."""

    def before(own: int) -> None:
        train_step = Loop.train_step

        def flipped(loop: Any) -> StepResult:
            result = train_step(loop)
            if own == rank and result.step == step:
                parameter = next(
                    p for part in loop._pipeline.parts for n, p in part.named_parameters() if n.endswith(name)
                )
                held = parameter if quantity is None else loop._optimizer.state[parameter][quantity]
                local = held.to_local() if isinstance(held, DTensor) else held
                local.detach().view(torch.int32).reshape(-1)[0] ^= 1
            return result

        Loop.train_step = flipped  # type: ignore[method-assign]

    return before


@pytest.mark.parametrize(
    ("layout", "ranks", "sabotage", "words"),
    [
        (f"{REPLICAS} 3", 3, flip(1, NORM), f"{NORM} on rank 1 is not that of the ranks 0, 2"),
        (f"{REPLICAS} 2", 2, flip(0, NORM, "exp_avg"), f"exp_avg of {NORM} differs among the ranks 0, 1"),
        (
            f"{REPLICAS} 2 {pipeline(2)}",
            4,
            flip(3, "wq.weight"),
            "attention.wq.weight differs among the ranks 2, 3",
        ),
        ("--training.tensor_parallel_degree 2", 2, flip(1, NORM), f"{NORM} differs among the ranks 0, 1"),
        (
            f"{pipeline(2)} --model.override.tie_embeddings true",
            2,
            flip(1, "tok_embeddings.weight"),
            "the two copies of the tied embedding on ranks 0 and 1 differ",
        ),
    ],
    ids=["three replicas", "moments", "replicas of a stage", "tensor", "tied"],
)
def test_one_bit_that_differs_ends_the_job_with_rank_and_name(
    tmp_path: Path, layout: str, ranks: int, sabotage: Callable[[int], None], words: str
) -> None:
    job = Forked.start(tiny(tmp_path, layout, EVERY_2, "--checkpoint.interval 2", steps=6), ranks, sabotage)
    assert job.wait() == [ExitCode.RANK_FAILED] * ranks, job.said
    last = job.said.strip().splitlines()[-1]
    assert words in last, job.said
    assert "step 4, comparing replicas" in last
    assert values(tmp_path, "step") == [1, 2, 3, 4]
    # What is wrong is not saved: the run goes on from what was right.
    assert [path.name for path in (tmp_path / "checkpoint").glob("step-*")] == ["step-2"]


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ("", 1),
        (f"{REPLICAS} 2 {pipeline(2)} --model.override.tie_embeddings true", 4),
        pytest.param("--training.tensor_parallel_degree 2 --optimizer.name Muon", 4, marks=pytest.mark.slow),
    ],
)
def test_what_is_the_same_is_found_to_be(tmp_path: Path, layout: str, ranks: int) -> None:
    run(tiny(tmp_path, layout, EVERY_2), ranks)


@given(
    numbers=st.lists(st.floats(width=32), min_size=1, max_size=3000),
    bit=st.integers(0, 31),
    data=st.data(),
)
def test_every_bit_counts(numbers: list[float], bit: int, data: st.DataObject) -> None:
    tensor = torch.tensor(numbers, dtype=torch.float32)
    place = data.draw(st.integers(0, len(numbers) - 1))
    other = tensor.clone()
    other.view(torch.int32)[place] ^= -(2**31) if bit == 31 else 1 << bit
    assert checksum(tensor) == checksum(tensor.clone()) != checksum(other)


def test_numbers_of_all_formats_have_a_checksum() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        tensor = torch.arange(5000).to(dtype).view(50, 100)
        assert checksum(tensor.T) == checksum(tensor.T.contiguous())
