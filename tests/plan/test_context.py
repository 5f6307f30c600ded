"""What the plan says of context parallelism is what ranks send and hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from models.layers.attend import Attend
from parallelisms.collectives import Group as Members
from parallelisms.context.gather import gather_backward, gather_forward
from parallelisms.context.heads import attend_by_heads
from parallelisms.context.ring import ring_backward, ring_forward
from parallelisms.context.span import Group, Span
from parallelisms.context.split import SequenceSplit
from parallelisms.layout import RotateMethod
from tests.distributed.ranks import run_ranks
from tests.plan.measure import Alive, Collectives, debug_config
from trainer.plan.accelerators import find_accelerator
from trainer.plan.context import context_buffers, context_traffic, unevenness
from trainer.plan.memory import forecast_memory
from trainer.plan.nodes import place_in_nodes
from trainer.plan.plan import Plan, make_plan
from trainer.plan.speed import estimate_step

METHODS: tuple[RotateMethod, ...] = ("allgather", "alltoall", "ulysses")
RANKS, LENGTH, ROWS = 4, 128, 2


def plan_of(method: RotateMethod, ranks: int = RANKS, length: int = LENGTH, **tables: dict[str, Any]) -> Plan:
    """One layer of the debug model: 8 heads of 32 features, 4 of keys and values."""
    experimental = {
        "context_parallel_degree": ranks,
        "context_parallel_rotate_method": method,
        **tables.pop("experimental", {}),
    }
    training = {"batch_size": ROWS, "seq_len": length, **tables.pop("training", {})}
    model = {"override": {"n_layers": 1}, **tables.pop("model", {})}
    config = debug_config({"model": model, "training": training, "experimental": experimental, **tables})
    return make_plan(config, ranks)


@pytest.mark.parametrize("method", METHODS)
def test_ranks_send_and_hold_in_attention_what_is_planned(method: RotateMethod) -> None:
    plan = plan_of(method)
    sent = context_traffic(plan, ["layers.0"])
    held = context_buffers(plan)
    for forward, backward in run_ranks(_measure, RANKS, method):
        assert (forward["sent"], backward["sent"]) == (sent.forward, sent.backward)
        if method != "ulysses":  # whose attention in between is that of one process
            assert forward["held"] == pytest.approx(ROWS * held.forward, rel=0.15)
            assert backward["held"] == pytest.approx(ROWS * held.backward, rel=0.15)


def _measure(rank: int, method: RotateMethod) -> tuple[dict[str, float], dict[str, float]]:
    group = Group(Members.of(init_device_mesh("cpu", (RANKS,))), SequenceSplit(RANKS))
    span = Span(group, LENGTH, 0.5, None, None)
    shapes = [(ROWS, heads, LENGTH // RANKS, 32) for heads in (8, 4, 4)]
    own = [torch.randn(shape, requires_grad=method == "ulysses") for shape in shapes]
    if method == "ulysses":
        attend = Attend()

        def forward() -> Tensor:
            return attend_by_heads(span, attend.forward, *own, {None: None})

        def backward(y: Tensor) -> None:
            y.backward(torch.ones_like(y))

        return _costs(forward, backward)
    there, back = (ring_forward, ring_backward) if method == "alltoall" else (gather_forward, gather_backward)
    gradient = torch.ones(shapes[0])
    return _costs(lambda: there(span, *own), lambda whole: back(span, *own, whole, gradient))


def _costs(forward: Any, backward: Any) -> tuple[dict[str, float], dict[str, float]]:
    result, there = _cost(forward)
    return there, _cost(lambda: backward(result))[1]


def _cost(call: Any) -> tuple[Any, dict[str, float]]:
    with Alive() as alive, Collectives() as collectives:
        result = call()
    size = collectives.bytes
    of_parts = size["reduce_scatter_tensor"] + size["all_to_all_single"]
    gathered = (RANKS - 1) * size["all_gather_into_tensor"]
    return result, {"sent": size["send"] + gathered + (RANKS - 1) * of_parts // RANKS, "held": alive.most}


def test_layers_that_are_computed_again_ask_again() -> None:
    once = context_traffic(plan_of("allgather"), ["layers.0"])
    full = {"activation_checkpoint": {"mode": "full"}}
    again = context_traffic(plan_of("allgather", **full), ["layers.0"])
    assert (again.forward, again.backward) == (once.forward, once.backward + once.forward)
    kept = {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"}}
    assert context_traffic(plan_of("allgather", **kept), ["layers.0"]) == once


def test_context_ranks_hold_the_activations_of_their_part_of_a_sequence() -> None:
    many, one = plan_of("alltoall", 4, 256), plan_of("alltoall", 1, 64)
    assert forecast_memory(many)[0].activations == forecast_memory(one)[0].activations
    assert many.tokens_per_step == 4 * one.tokens_per_step


def test_what_matters_of_context_parallelism_is_in_the_digest() -> None:
    plans = [plan_of(method) for method in METHODS]
    plans.append(plan_of("allgather", experimental={"context_parallel_load_balancer": "none"}))
    assert len({plan.digests["parallelism"] for plan in plans}) == len(plans)


def test_balanced_ranks_and_rings_are_estimated_to_be_faster() -> None:
    def seconds(method: RotateMethod, balancer: str = "headtail") -> float:
        big = {"flavor": "8B", "override": {}}
        plan = plan_of(
            method,
            8,
            65536,
            model=big,
            training={"mixed_precision_param": "bfloat16"},
            experimental={"context_parallel_load_balancer": balancer},
        )
        accelerator = find_accelerator("H100")
        assert accelerator is not None
        estimate = estimate_step(plan, accelerator, place_in_nodes(plan.layout, 8))
        assert estimate is not None
        return estimate.seconds

    assert seconds("alltoall") < seconds("allgather") < seconds("allgather", "none")
    contiguous = plan_of("alltoall", experimental={"context_parallel_load_balancer": "none"})
    assert unevenness(contiguous) == 2 - 1 / RANKS
    by_heads = replace(contiguous.parallelism, rotate_method="ulysses")
    assert unevenness(replace(contiguous, parallelism=by_heads)) == 1
