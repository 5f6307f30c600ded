"""Sends are let go of as soon as the lists tell that they are complete, and never before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallelisms.pipeline.actions import Action, Kind
from parallelisms.pipeline.factory import PipelineSchedule, build_schedule
from parallelisms.pipeline.progress import Progress
from parallelisms.pipeline.release import release_points
from parallelisms.pipeline.schedules.catalogue import find
from parallelisms.pipeline.setting import Costs, Setting

NAMES = ["GPipe", "1F1B", "Interleaved1F1B", "ZB-H1", "ZBVZeroBubble", "DualPipeV"]


def schedule_of(name: str, ranks: int, microbatches: int) -> PipelineSchedule:
    placement = find(name).place(ranks)
    return build_schedule(name, Setting(placement, microbatches, Costs.equal(placement.stages)))


def consumer(send: Action) -> set[Action]:
    """The actions that wait for the message."""
    if send.kind is Kind.SEND_ACTIVATION:
        return {Action(send.stage + 1, Kind.FORWARD, send.microbatch)}
    kinds = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
    return {Action(send.stage - 1, kind, send.microbatch) for kind in kinds}


@given(name=st.sampled_from(NAMES), ranks=st.integers(1, 5), microbatches=st.integers(1, 12))
def test_a_send_is_released_only_after_its_message_was_consumed(
    name: str, ranks: int, microbatches: int
) -> None:
    schedule = schedule_of(name, ranks, microbatches)
    stretches = Progress(schedule.actions, schedule.placement).stretches()
    order = [action for each in stretches for action in schedule.actions[each.rank][each.start : each.stop]]
    when = {action: index for index, action in enumerate(order)}
    for rank, actions in enumerate(schedule.actions):
        for position, sends in release_points(schedule.actions, schedule.placement, rank).items():
            for send in sends:
                consumed = min(when[action] for action in consumer(send) if action in when)
                assert consumed < when[actions[position]], (send, actions[position])


@pytest.mark.parametrize("name", NAMES)
def test_sends_in_flight_do_not_grow_with_the_number_of_microbatches(name: str) -> None:
    def most_in_flight(microbatches: int) -> int:
        schedule = schedule_of(name, 4, microbatches)
        worst = 0
        for rank, actions in enumerate(schedule.actions):
            releases = release_points(schedule.actions, schedule.placement, rank)
            flying = 0
            for position, action in enumerate(actions):
                flying += action.kind.is_send
                worst = max(worst, flying)
                flying -= len(releases.get(position, ()))
        return worst

    growth = most_in_flight(32) - most_in_flight(16)
    # GPipe holds all forwards before the first backward: nothing comes back that could tell anything.
    assert growth <= (16 if name == "GPipe" else 1)
