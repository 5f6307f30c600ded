"""Every schedule, any number of microbatches, trains like one process."""

from __future__ import annotations

import pytest

from parallelisms.pipeline.schedules.catalogue import FAMILIES
from tests.distributed.pipeline_run import Case, assert_equals_one_process, run_cases
from tests.distributed.ranks import run_ranks

NAMES = [family.name for family in FAMILIES]


def check(cases: list[Case], world_size: int, timeout: float = 120.0) -> None:
    by_rank = run_ranks(run_cases, world_size, cases, timeout=timeout)
    for position, case in enumerate(cases):
        assert_equals_one_process(case, [results[position] for results in by_rank])


@pytest.mark.parametrize("name", NAMES)
def test_four_ranks_train_like_one_process_for_any_number_of_microbatches(name: str) -> None:
    """Cases P1 (fewer microbatches than stages hang) and P11 (output i paired with labels j): labels differ in
    every row, and the loss of each microbatch is compared."""
    check([Case(name, 4, m) for m in (1, 2, 3, 5, 9)], 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_microbatch_count_and_stages_per_rank(name: str) -> None:
    """Case P1; all of m = 1..9 on four ranks."""
    family = next(family for family in FAMILIES if family.name == name)
    each = (1,) if family.single_stage else (2,) if family.placement == "v" else (1, 2, 3, 4)
    for ranks in (1, 2):
        check([Case(name, ranks, m, v) for m in (1, 2, 3, 5, 8) for v in each], ranks, 240)
    check([Case(name, 4, m, v) for m in range(1, 10) for v in each if 4 * v <= 9], 4, 240)


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "ZB-H1", "Interleaved1F1B"])
def test_eight_sequences_in_three_microbatches_on_three_ranks(name: str) -> None:
    """Case P2: a batch that its microbatches do not divide; wrong buffers."""
    check([Case(name, 3, 3, batch=8)], 3)


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_that_are_both_neighbours_of_each_other_keep_messages_apart(name: str) -> None:
    """Case P3: with p = 2 the next and the previous rank are the same peer; two stages per rank where there can be."""
    check([Case(name, 2, m) for m in (1, 3, 4)], 2)


QUICK_WITH_FSDP = ("1F1B", "ZBVZeroBubble")
with_fsdp = [n if n in QUICK_WITH_FSDP else pytest.param(n, marks=pytest.mark.slow) for n in NAMES]


@pytest.mark.parametrize("name", with_fsdp)
def test_pipeline_with_fsdp_and_accumulation_equals_one_process(name: str) -> None:
    """Case P9: a split backward bypasses the hooks of data parallelism."""
    check([Case(name, 2, m, batch=4, shard=2, accumulation=2) for m in (1, 3)], 4)


@pytest.mark.parametrize("name", ["1F1B", "ZBVZeroBubble", "ZB-H1"])
def test_split_backward_is_correct_under_activation_checkpointing(name: str) -> None:
    check([Case(name, 2, 3, checkpointing="full")], 2)


@pytest.mark.slow
def test_split_backward_is_correct_under_activation_checkpointing_with_fsdp() -> None:
    check([Case("ZBVZeroBubble", 2, 3, batch=4, shard=2, checkpointing="full")], 4)


def test_a_rank_without_any_counted_token_contributes_nothing() -> None:
    """Case L3: a fully masked rank gives 0/0, or clamping per sample biases the loss."""
    check([Case("1F1B", 1, 2, batch=2, shard=2, masked_rows=2)], 2)
    check([Case("1F1B", 2, 2, batch=2, shard=2, masked_rows=2)], 4)


@pytest.mark.slow
def test_hybrid_sharding_with_pipeline_equals_one_process() -> None:
    check([Case("1F1B", 2, 2, batch=2, shard=2, replicate=2)], 8)
