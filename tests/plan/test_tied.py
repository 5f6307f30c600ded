"""What an embedding costs that two stages hold, since the output of the one is tied to that of the other."""

from __future__ import annotations

from typing import Any

from models.registry import configured_sizes
from tests.plan.configs import config
from trainer.plan.memory import forecast_memory
from trainer.plan.network import forecast_traffic
from trainer.plan.plan import Plan, make_plan
from trainer.plan.render import render
from trainer.plan.splits import Splits

MATRIX = 2048 * 256  # of the debug model
FP32 = 4


def planned(
    tied: bool, degree: int = 2, schedule: str = "1F1B", world_size: int = 2, tables: Any = None
) -> Plan:
    model = {"name": "llama3", "flavor": "debug", "override": {"tie_embeddings": tied}}
    experimental = {"pipeline_parallel_degree": degree, "pipeline_parallel_schedule": schedule}
    return make_plan(config(model=model, experimental=experimental, **(tables or {})), world_size)


def test_parameters_are_counted_once_and_kept_twice() -> None:
    tied, own = planned(True), planned(False)
    assert tied.parameters == own.parameters - MATRIX
    assert tied.parameters == planned(True, degree=1, world_size=1).parameters
    assert tied.bytes_of_rank == own.bytes_of_rank
    assert sum(stage.parameters for stage in tied.stages) == tied.parameters + MATRIX
    assert [rank.state for rank in forecast_memory(tied)] == [rank.state for rank in forecast_memory(own)]


def test_the_owners_of_both_copies_exchange_their_part_of_the_gradient_once_a_step() -> None:
    accumulated = {"training": {"batch_size": 2, "global_batch_size": 8}}
    for tables, world_size, shards in (({}, 4, 1), ({}, 8, 2), (accumulated, 4, 1)):
        plan = planned(True, degree=4, world_size=world_size, tables=tables)
        traffic = [rank.tied for rank in forecast_traffic(plan)]
        assert traffic == [MATRIX * FP32 // shards, 0, 0, MATRIX * FP32 // shards]
        assert all(rank.total >= rank.tied for rank in forecast_traffic(plan))


def test_a_rank_with_both_copies_sends_nothing() -> None:
    plan = planned(True, schedule="ZBVZeroBubble")
    assert plan.tied_owners == (0, 0)
    assert all(rank.tied == 0 for rank in forecast_traffic(plan))


def test_without_a_copy_the_plan_does_not_speak_of_it() -> None:
    for plan in (planned(False), planned(True, degree=1, world_size=1)):
        assert plan.tied_owners is None
        assert "tied" not in render(plan)
    text = render(planned(True))
    assert "output (tied to tok_embeddings: a copy of it)" in text
    assert "tied  total" in text


def test_the_copy_is_weighed_where_stages_are_balanced_by_parameters() -> None:
    tied, own = (
        configured_sizes("llama3", "debug", "rmsnorm", {"tie_embeddings": each}) for each in (True, False)
    )
    for stages in (2, 4):
        assert Splits(tied, 2048).of(stages, by_parameters=True) == Splits(own, 2048).of(
            stages, by_parameters=True
        )
