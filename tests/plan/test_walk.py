"""What is alive on a rank while it carries out its list, on lists that can be followed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from parallelisms.pipeline.actions import Action
from trainer.plan.activations import StageActivations
from trainer.plan.state import StateBytes
from trainer.plan.walk import StageMemory, Walked, walk

# A microbatch of one sequence holds 100 and 1 more; 30 from input gradient to weight gradient; messages of 10.
ACTIVATIONS = StageActivations(
    held=100, held_once=1, deferred=30, temporary=7, layer_temporary=5, forward_temporary=3, boundary=10
)
STAGE = StageMemory(
    activations=ACTIVATIONS,
    gradients=40,
    gathered=0,
    gather_buffer=0,
    unreduced=0,
    reduce_buffer=0,
    fresh_gradients=0,
    fresh_input_gradients=0,
    fresh_weight_gradients=0,
    loss_gradient=0,
    first=True,
    last=True,
)
SHARDED = replace(STAGE, gathered=1000, gather_buffer=500, unreduced=2000, reduce_buffer=300)
STATE = StateBytes(parameters=40, gradients=40, optimizer=80)


def follow(text: str, stage: StageMemory, rows: Sequence[int] = (1, 1, 1), continues: bool = False) -> Walked:
    return walk([Action.parse(each) for each in text.split()], {0: stage}, STATE, rows, continues=continues)


def test_microbatches_hold_activations_from_forward_to_backward() -> None:
    assert follow("0F0 0B0 0F1 0B1", STAGE).activations == 101
    assert follow("0F0 0F1 0B0 0F2 0B1 0B2", STAGE).activations == 202
    assert follow("0F0 0F1 0F2 0B0 0B1 0B2", STAGE, rows=(3, 2, 1)).activations == 603


def test_after_the_input_gradient_only_operands_of_the_weight_gradient_are_held() -> None:
    assert follow("0F0 0I0 0F1 0I1 0W0 0W1", STAGE).activations == 101 + 30


def test_where_a_recomputed_layer_makes_the_operands_they_may_be_more_than_what_was_held() -> None:
    stage = replace(STAGE, activations=replace(ACTIVATIONS, held=10, held_once=0, deferred=90))
    assert follow("0F0 0I0 0F1 0I1 0W0 0W1", stage).activations == 180


def test_the_peak_names_its_moment_and_its_parts_add_up() -> None:
    peak = follow("0F0 0F1 0B0 0B1", STAGE).peak
    # State without gradients 120, two microbatches 202, and 7 for the backward: the first gradients come as the
    # activations go.
    assert (peak.action, peak.total) == ("0B0", 120 + 202 + 7)
    assert (peak.parameters, peak.optimizer, peak.gradients) == (40, 80, 0)
    assert peak.doing == "backward"


def test_with_small_activations_the_peak_is_the_optimizer_s_turn() -> None:
    small = replace(STAGE, activations=StageActivations(1, 0, 0, 0, 0, 0, 0), gradients=400)
    assert follow("0F0 0B0", small).peak.action in ("0B0", "optimizer")
    assert follow("0F0 0B0", small).peak.gradients == 400


def test_messages_count_until_they_are_used_or_sent() -> None:
    middle = replace(STAGE, first=False, last=False)
    received = follow("0RECV_F0 0RECV_F1 0F0 0SEND_F0 0F1 0SEND_F1", middle).peak
    # During 0F1: both microbatches are held with their inputs, and the output of the first is on its way.
    assert received.buffers == 10
    assert received.activations == 202
    backward = follow("0RECV_F0 0F0 0SEND_F0 0RECV_B0 0B0 0SEND_B0", middle).peak
    assert (backward.action, backward.buffers) == ("0B0", 10 + 10)


def test_parameters_are_gathered_and_gradients_wait_whole_until_they_are_reduced() -> None:
    peak = follow("0UNSHARD 0F0 0B0 0F1 0B1 0REDUCE_GRAD 0RESHARD", SHARDED).peak
    assert peak.action == "0REDUCE_GRAD"
    assert (peak.gathered, peak.unreduced, peak.workspace) == (1000, 2000, 300)


def test_gathering_needs_a_buffer_until_the_first_forward_is_through() -> None:
    peak = follow("0UNSHARD 0F0", SHARDED).peak
    assert (peak.gathered, peak.buffers) == (1000, 500)
    assert follow("0UNSHARD 0F0 0F1 0F2", SHARDED).peak.buffers in (0, 500)


def test_a_run_after_another_starts_with_parameters_and_gradients_of_that() -> None:
    first = follow("0UNSHARD 0F0 0B0 0RESHARD", SHARDED)
    second = follow("0UNSHARD 0F0 0B0 0RESHARD", SHARDED, continues=True)
    assert second.peak.unreduced == 2000
    assert first.peak.total < second.peak.total
