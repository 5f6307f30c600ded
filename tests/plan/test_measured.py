"""What the plan predicts of memory and traffic is what real ranks have, for the debug model in many layouts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from models.activations import Kernels
from tests.plan.measure import debug_config, measure
from trainer.plan.memory import forecast_memory
from trainer.plan.network import collective_traffic
from trainer.plan.plan import make_plan

Tables = Mapping[str, Mapping[str, Any]]


def pipeline(schedule: str, degree: int = 2, microbatches: int = 4, **more: Any) -> dict[str, Any]:
    return {
        "pipeline_parallel_degree": degree,
        "pipeline_parallel_schedule": schedule,
        "pipeline_parallel_microbatches": microbatches,
        **more,
    }


BF16 = {"mixed_precision_param": "bfloat16"}
FULL = {"mode": "full"}
TENSOR = {"tensor_parallel_degree": 2}
EXPERT = {"expert_parallel_degree": 2}

LAYOUTS: dict[str, tuple[int, Tables]] = {
    "one process": (1, {}),
    "every second layer computed again, two microbatches": (
        1,
        {
            "activation_checkpoint": {"mode": "selective"},
            "experimental": {"pipeline_parallel_microbatches": 2},
        },
    ),
    "one process, masked documents": (1, {"data": {"mask_documents": True}}),
    "shard 2": (2, {}),
    "1F1B": (2, {"experimental": pipeline("1F1B")}),
    "ZBV, split backward": (2, {"experimental": pipeline("ZBVZeroBubble")}),
    "tensor 2, logits at once": (2, {"training": {**TENSOR, "fused_loss": False}}),
    "1F1B x shard 2": (4, {"experimental": pipeline("1F1B")}),
}
MORE_LAYOUTS: dict[str, tuple[int, Tables]] = {
    "tensor 4": (4, {"training": {"tensor_parallel_degree": 4}}),
    "tensor 2 x shard 2, bf16": (4, {"training": {**TENSOR, **BF16}}),
    "experts spread": (2, {"model": {"name": "qwen3_moe"}, "experimental": EXPERT}),
    "experts spread x tensor 2, all computed again": (
        4,
        {
            "model": {"name": "deepseek_v3"},
            "training": TENSOR,
            "experimental": EXPERT,
            "activation_checkpoint": FULL,
        },
    ),
    "tensor 2, latent attention": (2, {"model": {"name": "deepseek_v3"}, "training": TENSOR}),
    "one process, bf16": (1, {"training": BF16}),
    "one process, all layers computed again": (1, {"activation_checkpoint": FULL}),
    "GPipe, uneven microbatches, bf16": (
        2,
        {"training": BF16, "experimental": pipeline("GPipe", microbatches=3)},
    ),
    "Interleaved1F1B x shard 2, bf16": (
        4,
        {"training": BF16, "experimental": pipeline("Interleaved1F1B")},
    ),
    "one process, sliding window": (1, {"model": {"override": {"sliding_window": 8}}}),
    "1F1B, masked documents, bf16": (
        2,
        {"training": BF16, "data": {"mask_documents": True}, "experimental": pipeline("1F1B")},
    ),
    "1F1B, accumulated": (
        2,
        {"training": {"global_batch_size": 8}, "experimental": pipeline("1F1B")},
    ),
}


def quick_and_slow(quick: Mapping[str, Any], slow: Mapping[str, Any]) -> list[Any]:
    return [
        *(pytest.param(*case, id=name) for name, case in quick.items()),
        *(pytest.param(*case, id=name, marks=pytest.mark.slow) for name, case in slow.items()),
    ]


@pytest.mark.parametrize(("world_size", "tables"), quick_and_slow(LAYOUTS, MORE_LAYOUTS))
def test_state_is_predicted_exactly_and_activations_and_peak_within_a_tenth(
    tmp_path: Path, world_size: int, tables: Tables
) -> None:
    config = debug_config(tables)
    plan = make_plan(config, world_size)
    forecast = forecast_memory(plan, Kernels.CPU)
    for rank, measured in enumerate(measure(config, world_size, tmp_path)):
        expected = forecast[plan.layout.pipeline_rank(rank)]
        assert measured.parameters == expected.state.parameters
        assert measured.gradients == expected.state.gradients
        assert measured.optimizer == expected.state.optimizer
        assert measured.activations == pytest.approx(expected.activations, rel=0.1)
        # Storages that FSDP resizes cannot be followed from outside. A layer that is computed again is counted
        # with its whole backward, which is too much by a few tensors.
        if not plan.parallelism.sharded and plan.parallelism.checkpointing != "full":
            peak = expected.peak
            assert measured.alive == pytest.approx(peak.total - peak.parameters - peak.optimizer, rel=0.1)


@pytest.mark.parametrize(("name", "state_dtype"), [("Muon", "float32"), ("AdamW", "bfloat16")])
def test_what_other_optimizers_keep_is_predicted_exactly(tmp_path: Path, name: str, state_dtype: str) -> None:
    config = debug_config({"optimizer": {"name": name, "state_dtype": state_dtype}})
    plan = make_plan(config, 2)
    for measured in measure(config, 2, tmp_path):
        assert measured.optimizer == plan.bytes_of_rank[0].optimizer
    assert plan.bytes_of_rank[0].optimizer < 0.7 * make_plan(debug_config({}), 2).bytes_of_rank[0].optimizer


def test_recomputation_and_split_backward_together_hold_what_is_predicted(tmp_path: Path) -> None:
    # What is deferred is not among autograd's tensors, so everything alive is compared.
    tables = {"experimental": pipeline("ZB-H1", microbatches=3), "activation_checkpoint": FULL}
    config = debug_config(tables)
    plan = make_plan(config, 2)
    for rank, measured in enumerate(measure(config, 2, tmp_path)):
        peak = forecast_memory(plan, Kernels.CPU)[rank].peak
        assert measured.alive == pytest.approx(peak.total - peak.parameters - peak.optimizer, rel=0.1)


SMALL = {"dim": 32, "n_heads": 4, "n_kv_heads": 2, "ffn_hidden": 48, "vocab_size": 64}
TRAFFIC: dict[str, tuple[int, Tables]] = {
    "accumulated over three runs": (2, {"training": {"global_batch_size": 24}}),
    "pipeline, accumulated": (
        4,
        {"training": {"global_batch_size": 16}, "experimental": pipeline("1F1B")},
    ),
}
MORE_TRAFFIC: dict[str, tuple[int, Tables]] = {
    "one microbatch": (2, {}),
    "two microbatches": (2, {"experimental": {"pipeline_parallel_microbatches": 2}}),
    "two microbatches, two runs": (
        2,
        {"training": {"global_batch_size": 16}, "experimental": {"pipeline_parallel_microbatches": 2}},
    ),
    "pipeline": (4, {"experimental": pipeline("1F1B")}),
    "pipeline, always released": (
        4,
        {
            "training": {"fsdp_reshard_after_forward": "always"},
            "experimental": pipeline("1F1B"),
        },
    ),
    "two runs, never released": (
        2,
        {"training": {"global_batch_size": 16, "fsdp_reshard_after_forward": "never"}},
    ),
}


@pytest.mark.parametrize(("world_size", "tables"), quick_and_slow(TRAFFIC, MORE_TRAFFIC))
def test_bytes_of_gathering_and_reducing_are_those_of_the_collectives(
    tmp_path: Path, world_size: int, tables: Tables
) -> None:
    config = debug_config({**tables, "model": {"override": SMALL}})
    plan = make_plan(config, world_size)
    forecast = collective_traffic(plan)
    for rank, measured in enumerate(measure(config, world_size, tmp_path)):
        expected = forecast[plan.layout.pipeline_rank(rank)]
        # A gather fills the whole of every group, of which each of two ranks sends half; a reduce-scatter
        # leaves each its half, and the other half is what it sent.
        assert plan.layout.shard == 2
        assert measured.collectives["_allgather_base_"] == 2 * expected.gather
        assert measured.collectives["_reduce_scatter_base_"] == expected.reduce_scatter


@pytest.mark.parametrize(
    ("world_size", "tables"),
    quick_and_slow(
        {"two ranks": (2, {"training": TENSOR})},
        {
            "latent attention": (2, {"model": {"name": "deepseek_v3"}, "training": TENSOR}),
            "pipeline, all computed again": (
                4,
                {"training": TENSOR, "experimental": pipeline("1F1B"), "activation_checkpoint": FULL},
            ),
        },
    ),
)
def test_bytes_that_tensor_ranks_exchange_are_those_of_the_collectives(
    tmp_path: Path, world_size: int, tables: Tables
) -> None:
    config = debug_config(tables)
    plan = make_plan(config, world_size)
    forecast, others = collective_traffic(plan), plan.layout.tensor - 1
    for rank, measured in enumerate(measure(config, world_size, tmp_path)):
        # Each rank gives its own part to all others; of a sum it sends all parts but its own, twice if all is summed.
        sent = measured.collectives["all_gather_into_tensor"] * others
        sent += measured.collectives["reduce_scatter_tensor"] * others // (others + 1)
        sent += 2 * measured.collectives["allreduce_"] * others // (others + 1)
        assert sent == forecast[plan.layout.pipeline_rank(rank)].tensor


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "full"])
def test_bytes_of_tokens_that_travel_to_experts_are_those_of_the_collectives(
    tmp_path: Path, mode: str
) -> None:
    tables = {"model": {"name": "qwen3_moe"}, "experimental": EXPERT, "activation_checkpoint": {"mode": mode}}
    config = debug_config(tables)
    plan = make_plan(config, 4)
    # Which experts are busy is not known beforehand, but over all ranks every use of an expert travels once each way:
    # half of them, or what is on the rank already, does not leave it.
    measured = sum(each.collectives["all_to_all_single"] for each in measure(config, 4, tmp_path))
    layers, experts, counted = plan.sizes.n_layers, plan.sizes.n_experts, 8
    counts = 4 * layers * experts * counted * (2 if mode == "full" else 1)
    assert measured - counts == 2 * 4 * collective_traffic(plan)[0].expert
