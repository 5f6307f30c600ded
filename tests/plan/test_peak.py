"""The more ranks share a model, the less memory each of them needs, by as much as the plan says."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from models.activations import Kernels
from tests.distributed.ranks import run_ranks
from tests.plan.measure import debug_config, local_bytes, run_step
from trainer.build import build_pipeline
from trainer.config.schema import Config
from trainer.optimizer import build_optimizer
from trainer.plan.memory import forecast_memory
from trainer.plan.plan import make_plan
from trainer.process import RankIdentity, RankProcess

MIXTURE = {"model": {"name": "qwen3_moe"}}
TABLES: Mapping[str, Mapping[str, Any]] = {
    "FSDP": {},
    "tensor parallelism": {"training": {"tensor_parallel_degree": 0}},
    "expert parallelism": {**MIXTURE, "experimental": {"expert_parallel_degree": 0}},
}


def peak_of_rank(rank: int, config: Config, world_size: int, record: str) -> int:
    """The most bytes that a rank's tensors took in the second step, from the allocator's own record.

    The optimizer's turn included. What other threads free (gloo's) is not in the record, so what seems left over at the
    end is taken off.
    """
    plan = make_plan(config, world_size)
    with RankProcess(RankIdentity(rank, rank, world_size), config, plan, Path(record)) as process:
        pipeline = build_pipeline(config, plan, process, process.progress)
        optimizer = build_optimizer(pipeline.parts, config.optimizer, process.device)
        cpu = torch.profiler.ProfilerActivity.CPU
        for _ in range(2):
            with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
                run_step(config, plan, pipeline)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        parameters = [p for part in pipeline.parts for p in part.parameters()]
        moments = [value for state in optimizer.state.values() for value in state.values()]
        kept = sum(map(local_bytes, (*parameters, *moments)))
    events = [each for each in profile.profiler.kineto_results.events() if each.name() == "[memory]"]
    alive = most = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    return kept + most - alive


@cache
def peaks(name: str, world_size: int) -> tuple[int, int]:
    """The plan's peak, and the fullest rank's."""
    tables = {
        table: {key: world_size if value == 0 else value for key, value in keys.items()}
        for table, keys in TABLES[name].items()
    }
    config = debug_config(tables)
    record = str(Path(mkdtemp()) / "failure.json")
    measured = run_ranks(peak_of_rank, world_size, config, world_size, record, process_group=False)
    return forecast_memory(make_plan(config, world_size), Kernels.CPU)[0].peak.total, max(measured)


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_the_peak_of_a_rank_falls_with_the_ranks_as_the_plan_says(name: str) -> None:
    for world_size in (1, 2, 4):
        planned, measured = peaks(name, world_size)
        assert measured == pytest.approx(planned, rel=0.1), world_size
    for fewer, more in ((1, 2), (2, 4)):
        planned = peaks(name, more)[0] / peaks(name, fewer)[0]
        measured = peaks(name, more)[1] / peaks(name, fewer)[1]
        assert planned < 0.9
        assert measured == pytest.approx(planned, rel=0.1)
