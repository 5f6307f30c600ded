"""What the timeline of a real run says, read from its file."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from parallelisms.pipeline.actions import Action, Kind
from parallelisms.pipeline.comparison import Cause, compare
from parallelisms.pipeline.costs import measured_costs
from parallelisms.pipeline.figures import measured_figures
from parallelisms.pipeline.measured import MeasuredAction, Timeline
from tests.distributed.ranks import run_ranks
from tests.distributed.timeline_run import Sleep, measure


def compute(timeline: Timeline) -> list[dict[Action, MeasuredAction]]:
    return [{each.action: each for each in rank.compute} for rank in timeline.ranks]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("delayed")


@pytest.fixture(scope="module")
def delayed(run_folder: Path) -> Timeline:
    """1F1B in which the forward of stage 2 takes three times as long."""
    return measure(Sleep("1F1B", run_folder, slow={2: 0.02}))[0]


def test_a_delay_stands_in_the_timeline_where_it_is(delayed: Timeline) -> None:
    # A sleep never ends early. On a busy machine it may end late now and then, so the upper bounds are of medians.
    for each in (action for rank in delayed.ranks for action in rank.compute):
        slow = (each.action.stage, each.action.kind) == (2, Kind.FORWARD)
        assert each.seconds >= (0.03 if slow else 0.01 if each.action.kind is Kind.FORWARD else 0.02), each
    costs = measured_costs(delayed)
    assert costs.forward[2] == pytest.approx(0.03, abs=0.008)
    assert [costs.forward[stage] for stage in (0, 1, 3)] == pytest.approx([0.01] * 3, abs=0.008)
    assert costs.backward_input == pytest.approx((0.01,) * 4, abs=0.004)


def test_the_waiting_that_a_delay_causes_stands_on_the_ranks_that_wait_for_it(delayed: Timeline) -> None:
    last = compute(delayed)[3]
    # Rank 3 has nothing to do but what stage 2 sends: it waits for each forward, 20 ms and more each time.
    for microbatch in range(1, 8):
        forward = last[Action(3, Kind.FORWARD, microbatch)]
        assert forward.waits_for == Action(3, Kind.RECEIVE_ACTIVATION, microbatch)
        assert forward.peer == 2
        assert forward.wait_end == forward.start
    waiting = measured_figures(delayed, 0).waiting
    # The delay of 8 x 20 ms is waited for by the others, and stage 2 itself waits least.
    planned = [0.06, 0.06, 0.06, 0.06]
    for rank in (0, 1, 3):
        assert waiting[rank] > planned[rank] + 0.08, waiting
        assert waiting[rank] > waiting[2] + 0.08, waiting


def test_what_was_measured_keeps_the_order_and_the_dependencies_of_the_schedule(delayed: Timeline) -> None:
    slack = delayed.clock_bound
    for rank, planned in zip(delayed.ranks, delayed.schedule.actions, strict=True):
        done = [each.action for each in sorted(rank.actions, key=lambda each: each.came)]
        assert [a for a in done if a.kind.is_compute] == [a for a in planned if a.kind.is_compute]
        own = rank.compute
        assert all(before.end <= after.start for before, after in pairwise(own))
    by_rank = compute(delayed)
    for microbatch in range(8):
        for stage in range(3):
            sender = by_rank[stage][Action(stage, Kind.FORWARD, microbatch)]
            receiver = by_rank[stage + 1][Action(stage + 1, Kind.FORWARD, microbatch)]
            assert sender.end <= receiver.start + slack
            sender = by_rank[stage + 1][Action(stage + 1, Kind.BACKWARD, microbatch)]
            receiver = by_rank[stage][Action(stage, Kind.BACKWARD, microbatch)]
            assert sender.end <= receiver.start + slack


def test_the_slow_stage_is_named_as_the_cause_of_what_was_late(delayed: Timeline) -> None:
    comparison = compare(delayed)
    first = comparison.groups()[0]
    assert first.actions[0].cause is Cause.SLOW_STAGE
    assert {(each.action.stage, each.action.kind) for each in first.actions} == {(2, Kind.FORWARD)}
    late = [each for each in comparison.late if each.cause is Cause.LATE_RECEIVE and each.origin is not None]
    lost = {stage: sum(each.lost for each in late if each.origin.stage == stage) for stage in range(4)}
    assert max(lost, key=lambda stage: lost[stage]) == 2


def test_all_three_files_are_there_and_whole(delayed: Timeline, run_folder: Path) -> None:
    folder = run_folder / "timeline"
    assert sorted(path.name for path in folder.iterdir()) == [
        "step-1.json",
        "step-1.svg",
        "step-1.trace.json",
    ]
    ElementTree.parse(folder / "step-1.svg")
    trace = json.loads((folder / "step-1.trace.json").read_text())
    arrows = [event["ph"] for event in trace["traceEvents"] if event["name"] == "message"]
    assert arrows.count("s") == arrows.count("f") == 2 * 3 * 8


def test_gpipe_has_different_microbatches_at_the_same_time_on_different_ranks(tmp_path: Path) -> None:
    timeline = measure(Sleep("GPipe", tmp_path))[0]
    forwards = [
        [each for each in rank.compute if each.action.kind is Kind.FORWARD] for rank in timeline.ranks
    ]
    # In the middle of the forward of the last rank's first microbatch every rank is at another one.
    middle = (forwards[3][0].start + forwards[3][0].end) / 2
    at_work = [
        next((each.action.microbatch for each in own if each.start <= middle <= each.end), None)
        for own in forwards
    ]
    assert at_work == [3, 2, 1, 0]
    # Half the forwards of rank 0 overlap with forwards of every other rank.
    for other in forwards[1:]:
        overlapping = [
            first
            for first in forwards[0]
            if any(max(first.start, each.start) < min(first.end, each.end) for each in other)
        ]
        assert len(overlapping) >= 4


def test_ranks_whose_clocks_differ_by_seconds_are_put_on_one_clock(tmp_path: Path) -> None:
    clocks = {1: 5.0, 2: 3_000.0, 3: 0.25}
    timeline = measure(Sleep("1F1B", tmp_path, microbatches=4, clocks=clocks))[0]
    assert 0 < timeline.clock_bound < 0.01
    by_rank = compute(timeline)
    for stage in range(3):
        sender = by_rank[stage][Action(stage, Kind.FORWARD, 0)]
        receiver = by_rank[stage + 1][Action(stage + 1, Kind.FORWARD, 0)]
        assert -timeline.clock_bound <= receiver.start - sender.end < 0.02
    assert measured_figures(timeline, 0).step < 0.5


def test_accumulated_runs_and_several_pipelines_stand_in_one_timeline(tmp_path: Path) -> None:
    sleep = Sleep("1F1B", tmp_path, pipeline=2, microbatches=2, replicas=2, accumulation=3, seconds=0.004)
    timeline = measure(sleep)[0]
    assert timeline.schedule.runs == 3
    assert timeline.replicas == (0, 1)
    assert [(r.rank, r.pipeline_rank, r.replica) for r in timeline.ranks] == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 1, 0),
        (3, 1, 1),
    ]
    for rank in timeline.ranks:
        assert [each.run for each in rank.compute] == [0] * 4 + [1] * 4 + [2] * 4
    assert len(timeline.plan().spans[0]) == 12
    assert compare(timeline, 1).planned_step == pytest.approx(timeline.plan().step)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B", "ZB-H1", "ZBVZeroBubble"])
def test_the_prediction_from_measured_costs_is_within_5_percent_of_the_measured_step(
    name: str, tmp_path: Path
) -> None:
    """Case P5: a receive that is posted early blocks ready sends and adds a bubble; here the step is as predicted."""
    timelines = measure(Sleep(name, tmp_path, seconds=0.02, steps=4, slow={1: 0.01}))
    ratios = []
    for timeline in timelines:
        predicted = timeline.schedule.simulate(measured_costs(timeline)).step
        ratios.append(measured_figures(timeline, 0).step / predicted)
    # Of a machine with other work to do, the best step tells.
    best = min(ratios, key=lambda ratio: abs(ratio - 1))
    assert abs(best - 1) < 0.05, ratios


def _offset(rank: int) -> tuple[int, int]:
    import time

    from parallelisms.pipeline.clocks import measure_offset

    true_clock = time.monotonic_ns
    if rank == 1:
        time.monotonic_ns = lambda: true_clock() - 40_000_000_000
    offset = measure_offset((0, 1))
    return offset.offset_ns, offset.bound_ns


def test_the_offset_of_a_clock_is_found_within_its_bound() -> None:
    (zero, exact), (offset, bound) = run_ranks(_offset, 2, timeout=30)
    assert (zero, exact) == (0, 0)
    assert abs(offset - 40_000_000_000) <= bound < 5_000_000
