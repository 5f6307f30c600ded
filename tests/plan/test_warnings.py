"""Remarks of experience: each where it belongs, and not elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from tests.plan.configs import config, llama_405b
from trainer.plan.accelerators import find_accelerator
from trainer.plan.plan import make_plan
from trainer.plan.view import view_plan


def remarks(
    world_size: int,
    flavor: str = "debug",
    accelerator: str | None = None,
    gpus_per_node: int = 8,
    **tables: Any,
) -> str:
    named = None if accelerator is None else find_accelerator(accelerator)
    plan = make_plan(config(flavor, **tables), world_size)
    return "\n".join(view_plan(plan, gpus_per_node, named).warnings)


def pipeline(degree: int, microbatches: int, **more: Any) -> dict[str, Any]:
    return {
        "pipeline_parallel_degree": degree,
        "pipeline_parallel_microbatches": microbatches,
        **more,
    }


LARGE = {"batch_size": 1, "seq_len": 8192}


@pytest.mark.parametrize(
    ("world_size", "tables"),
    [
        (1, {}),
        (8, {"training": {"batch_size": 8}}),
        (8, {"flavor": "8B", "accelerator": "H100", "training": LARGE}),
    ],
)
def test_a_sound_plan_gets_no_remark(world_size: int, tables: dict[str, Any]) -> None:
    assert remarks(world_size, **tables) == ""


def test_a_large_bubble_names_what_lowers_it() -> None:
    text = remarks(4, training={"batch_size": 4}, experimental=pipeline(4, 4))
    assert "of the step is bubble" in text
    assert "16 is a good number for 4 pipeline ranks" in text
    assert "bubble" not in remarks(2, training={"batch_size": 32}, experimental=pipeline(2, 32))


def test_the_busiest_rank_is_named_where_work_is_uneven() -> None:
    points = {"pipeline_parallel_split_points": ["layers.6"]}
    text = remarks(2, training={"batch_size": 32}, experimental=pipeline(2, 32, **points))
    assert "pipeline rank 0 has" in text


def test_microbatches_that_do_not_divide_the_batch_are_told() -> None:
    text = remarks(2, training={"batch_size": 8}, experimental=pipeline(2, 3))
    assert "microbatches of 3 and of 2 sequences" in text
    assert "multiple of 3" in text


def test_short_microbatches_of_a_large_model_are_told_but_not_those_of_a_small_one() -> None:
    assert "only 512 tokens" in remarks(8, "8B", training={"batch_size": 1, "seq_len": 512})
    assert remarks(8, training={"batch_size": 1, "seq_len": 512}) == ""


@pytest.mark.parametrize(("schedule", "better"), [("GPipe", "1F1B"), ("LoopedBFS", "Interleaved1F1B")])
def test_schedules_that_hold_every_microbatch_are_compared_with_those_that_do_not(
    schedule: str, better: str
) -> None:
    experimental = pipeline(2, 16, pipeline_parallel_schedule=schedule)
    text = remarks(2, training={"batch_size": 16}, experimental=experimental)
    assert f"all 16 microbatches at once; {better}" in text
    assert "at once" not in remarks(2, training={"batch_size": 16}, experimental=pipeline(2, 16))


def test_accumulating_whole_gradients_beside_shards_is_told_with_its_size() -> None:
    text = remarks(8, "8B", training={**LARGE, "global_batch_size": 64})
    assert "8 backwards add up" in text
    assert "45 GiB" in text


def test_a_vocabulary_that_does_not_fill_tiles_is_told() -> None:
    uneven = config("8B", training=LARGE).model_copy(
        update={"model": config("8B").model.model_copy(update={"override": {"vocab_size": 50257}})}
    )
    assert "50304 would be faster" in "\n".join(view_plan(make_plan(uneven, 8)).warnings)


def test_too_much_memory_names_rank_largest_part_and_remedy() -> None:
    text = remarks(8, "8B", "A10", training=LARGE)
    assert "pipeline rank 0 needs" in text
    assert "more than the 22.5 GiB of A10" in text
    assert "activations: [activation_checkpoint] mode" in text


def test_a_loss_that_fills_the_accelerator_is_told() -> None:
    training = {"batch_size": 4, "seq_len": 8192, "fused_loss": False}
    assert "the loss of one microbatch needs 47.0 GiB" in remarks(8, "8B", "A100", training=training)
    assert "the loss" not in remarks(8, "8B", "A100", training={**training, "fused_loss": True})


def test_checkpointing_that_is_not_needed_is_told_with_what_it_costs() -> None:
    full = {"activation_checkpoint": {"mode": "full"}}
    text = remarks(8, "8B", "H100", training=LARGE, **full)
    assert "computes 32% more than needed" in text
    assert "than needed" not in remarks(8, "8B", "A10", training=LARGE, **full)


def test_full_precision_on_an_accelerator_is_told_but_not_on_a_cpu() -> None:
    training = {"mixed_precision_param": "float32", "batch_size": 8}
    assert "attention has no flash kernel" in remarks(1, accelerator="H100", training=training)
    assert remarks(1, accelerator="CPU", training=training) == ""


def test_shards_over_nodes_are_told_unless_the_state_needs_them() -> None:
    text = remarks(64, "8B", "H200", training=LARGE)
    assert "shard 64 spans nodes of 8" in text
    assert "data_parallel_shard_degree 8 with data_parallel_replicate_degree 8" in text
    assert "spans nodes" not in remarks(64, "70B", "A100-40", training=LARGE)


def test_replicas_that_share_a_node_are_told() -> None:
    training = {**LARGE, "data_parallel_replicate_degree": 2}
    assert "the 2 replicas share a node" in remarks(8, "8B", training=training)


def test_a_node_that_is_not_filled_is_told() -> None:
    assert "12 ranks do not fill nodes of 8: the last has 4" in remarks(12)


def test_the_shipped_layout_of_405b_fits_what_it_is_for() -> None:
    points = [f"layers.{index}" for index in range(1, 126, 2)]
    plan = make_plan(llama_405b(pipeline_parallel_split_points=points), 512)
    assert view_plan(plan, 8, find_accelerator("H100")).fits
