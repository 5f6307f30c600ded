"""Data parallelism communicates what it must and no more, and its policies change no result."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.ranks import run_ranks
from tests.distributed.test_parity import one_process, pipeline
from tests.distributed.training_run import assert_same_run, configuration, train, write_corpus
from trainer.build import build_pipeline
from trainer.config.schema import Config
from trainer.loss import loss_of_microbatches
from trainer.plan.plan import make_plan
from trainer.process import RankIdentity, RankProcess

LAYERS = 8


class Calls(TorchDispatchMode):
    """Counts collectives by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.name().startswith("c10d::"):
            self.counts[function.name().removeprefix("c10d::")] += 1
        return function(*args, **(kwargs or {}))


def _collectives(rank: int, config: Config, record: str) -> dict[str, int]:
    """Of the second step: the first one makes buffers."""
    plan = make_plan(config, 2)
    with RankProcess(RankIdentity(rank, rank, 2), config, plan, Path(record)) as process:
        built = build_pipeline(config, plan, process, process.progress)
        tokens = torch.zeros(plan.batch_size, plan.seq_len, dtype=torch.long).split(plan.rows)
        calls = Calls()
        for counting in (Calls(), calls):
            with counting:
                for run in range(plan.accumulation):
                    loss = loss_of_microbatches(tokens, torch.tensor(plan.tokens_per_step))
                    last = run == plan.accumulation - 1
                    built.executor.run(tokens, loss, last_accumulation=last)
        return dict(calls.counts)


def collectives(folder: Path, **training: Any) -> dict[str, int]:
    tables = {"training": {"batch_size": 2, **training}}
    config = configuration(write_corpus(folder), tables)
    answers = run_ranks(_collectives, 2, config, str(folder / "failure.json"), process_group=False)
    assert answers[0] == answers[1]
    return answers[0]


def test_accumulation_reduces_gradients_once_for_each_layer_and_the_rest(tmp_path: Path) -> None:
    counts = collectives(tmp_path, global_batch_size=16)
    assert counts["_reduce_scatter_base_"] == LAYERS + 1
    # Gathered in the first forward, and in its backward again but for the last layer; then they stay.
    gathered = LAYERS + 1 + LAYERS
    assert counts == {"_reduce_scatter_base_": LAYERS + 1, "_allgather_base_": counts["_allgather_base_"]}
    assert gathered <= counts["_allgather_base_"] < 4 * 2 * (LAYERS + 1)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "gathered"), [("never", 1), ("always", 4 * 2)])
def test_what_is_always_or_never_released_is_gathered_as_often(
    tmp_path: Path, policy: str, gathered: int
) -> None:
    counts = collectives(tmp_path, global_batch_size=16, fsdp_reshard_after_forward=policy)
    assert counts == {
        "_reduce_scatter_base_": LAYERS + 1,
        "_allgather_base_": gathered * (LAYERS + 1),
    }


def test_replicas_sum_gradients_once_and_gather_nothing(tmp_path: Path) -> None:
    """Case L5: also that nothing else is summed."""
    counts = collectives(tmp_path, global_batch_size=16, data_parallel_replicate_degree=2)
    assert counts == {"allreduce_": LAYERS + 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "training", "experimental"),
    [
        (4, {"fsdp_reshard_after_forward": "always"}, pipeline(2, "Interleaved1F1B", 3)),
        (4, {"enable_cpu_offload": True}, pipeline(2, "ZBVZeroBubble", 3)),
        (2, {"fsdp_reshard_after_forward": "never"}, {}),
    ],
    ids=["always, pipeline", "offloaded, pipeline", "never"],
)
def test_policies_change_no_result(
    tmp_path: Path, world_size: int, training: dict[str, Any], experimental: dict[str, Any]
) -> None:
    tables = {"training": {"batch_size": 4, **training}, "experimental": experimental}
    assert_same_run(one_process(8), train(tmp_path, world_size, tables))
