import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelisms.pipeline.actions import Action, Kind
from parallelisms.pipeline.assemble import assemble
from parallelisms.pipeline.measured import MeasuredAction
from parallelisms.pipeline.timeline_file import TimelineFileError, read_timeline, timeline_text
from parallelisms.pipeline.trace import trace_events, trace_text
from tests.pipeline.synthetic import measured, report, schedule_of

F0, RECEIVE = map(Action.parse, ("1F0", "1RECV_F0"))


# Putting ranks together


def test_ranks_are_put_on_the_clock_of_rank_0_from_when_the_first_one_began():
    schedule = schedule_of("GPipe", 2, 1)
    first = [MeasuredAction(Action.parse("0F0"), 0.5, 1.0)]
    second = [MeasuredAction(F0, 1.2, 1.5, wait_start=0.25, wait_end=1.2, waits_for=RECEIVE)]
    # Rank 1's clock is 3 s behind; it pressed the button 0.2 s earlier.
    reports = [
        report(0, first, 10_000_000_000),
        report(1, second, 6_800_000_000, offset_ns=3_000_000_000, bound_ns=40_000),
    ]
    timeline = assemble(3, reports, schedule)
    zero, one = (rank.actions[0] for rank in timeline.ranks)
    # Rank 1 came first: its wait began at 0.05 of rank 0's clock.
    assert one.wait_start == pytest.approx(0.0)
    assert (one.start, one.end) == pytest.approx((0.95, 1.25))
    assert (zero.start, zero.end) == pytest.approx((0.45, 0.95))
    assert timeline.ranks[1].clock_bound == pytest.approx(41e-6)
    assert timeline.clock_bound == pytest.approx(41e-6)
    assert "ping-pong" in timeline.clock_method


def test_between_hosts_the_bound_grows_with_the_time_since_the_step():
    schedule = schedule_of("GPipe", 2, 1)
    actions = [MeasuredAction(F0, 0.0, 1.0)]
    reports = [
        report(0, [MeasuredAction(Action.parse("0F0"), 0.0, 1.0)], 0),
        report(1, actions, 0, boot="b", measured_ns=2_000_000_000),
    ]
    assert assemble(1, reports, schedule).ranks[1].clock_bound == pytest.approx(1e-6 + 200e-6)


def test_a_send_is_complete_when_its_receiver_has_the_message():
    schedule = schedule_of("GPipe", 2, 1)
    send = MeasuredAction(Action.parse("0SEND_F0"), 1.0, 9.0, wait_start=8.0, wait_end=9.0)
    receive = MeasuredAction(RECEIVE, 0.5, 2.0)
    timeline = assemble(1, [report(0, [send], 0), report(1, [receive], 0)], schedule)
    assert timeline.ranks[0].actions[0].seconds == pytest.approx(1.0)


# The file


@given(
    st.sampled_from(["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"]),
    st.integers(1, 4),
    st.integers(1, 5),
)
@settings(deadline=None, max_examples=15)
def test_a_timeline_is_read_as_it_was_written(tmp_path_factory, name, ranks, microbatches):
    timeline = measured(schedule_of(name, ranks, microbatches, unit=0.125, transfer=0.0625))
    path = tmp_path_factory.mktemp("timeline") / "step-3.json"
    path.write_text(timeline_text(timeline))
    assert read_timeline(path) == timeline


def test_the_file_explains_itself():
    timeline = measured(schedule_of("1F1B", 2, 3, unit=0.1))
    data = json.loads(timeline_text(timeline))
    assert data["format"] == 1
    assert data["step"] == 3
    assert data["clock"]["method"]
    assert data["schedule"]["actions"][0].startswith("0F0 0SEND_F0 0RECV_B0")
    assert data["plan"]["step_seconds"] == pytest.approx(1.2)
    assert data["prediction"]["step_seconds"] == pytest.approx(1.2)
    assert data["measured"]["step_seconds"] == pytest.approx(1.2)
    assert data["plan"]["spans"][1][0] == {"action": "1F0", "start": 0.1, "end": 0.2}
    first = data["ranks"][1]["actions"][0]
    assert first["action"] == "1F0"
    assert first["waits_for"] == "1RECV_F0"
    assert (first["wait_start"], first["wait_end"]) == (0.0, 0.1)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is not JSON"),
        ("[]", "not a timeline of format 1"),
        ('{"format": 2}', "its format is 2"),
        ('{"format": 1, "step": 3}', "not a whole timeline"),
    ],
)
def test_a_file_that_is_no_timeline_is_refused_with_the_reason(tmp_path, text, reason):
    path = tmp_path / "step-1.json"
    path.write_text(text)
    with pytest.raises(TimelineFileError, match=reason):
        read_timeline(path)


def test_a_file_that_is_missing_is_refused(tmp_path):
    with pytest.raises(TimelineFileError, match="cannot be read"):
        read_timeline(tmp_path / "step-1.json")


# The trace


def with_transfers(timeline):
    """Sends and receives as the executor would have measured them."""
    made = {each.action: each.end for rank in timeline.ranks for each in rank.actions}
    makers = {Kind.SEND_ACTIVATION: Kind.FORWARD, Kind.SEND_GRADIENT: Kind.BACKWARD}
    ranks = []
    for rank in timeline.ranks:
        extra = []
        for action in timeline.schedule.actions[rank.pipeline_rank]:
            if action.kind.is_send:
                source = Action(action.stage, makers[action.kind], action.microbatch)
                extra.append(MeasuredAction(action, made[source], made[source] + 0.3))
            elif action.kind.is_receive:
                extra.append(MeasuredAction(action, 0.0, 5.0))
        ranks.append(replace(rank, actions=rank.actions + tuple(extra)))
    return replace(timeline, ranks=tuple(ranks))


def test_the_trace_has_a_process_for_each_rank_with_named_tracks_that_never_overlap():
    timeline = with_transfers(measured(schedule_of("1F1B", 4, 6, unit=0.1)))
    events = json.loads(trace_text(timeline))["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {rank: f"rank {rank} (stage {rank})" for rank in range(4)}
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [e for e in events if e["ph"] == "X"]
    assert {tracks[e["pid"], e["tid"]].split()[0] for e in slices} == {"compute", "send", "receive"}
    for track in tracks:
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in slices if (e["pid"], e["tid"]) == track)
        assert all(before[1] <= after[0] + 2e-3 for before, after in pairwise(own)), track


def test_an_arrow_leads_from_every_send_to_its_receive():
    timeline = with_transfers(measured(schedule_of("1F1B", 2, 3, unit=0.1)))
    events = list(trace_events(timeline))
    slices = [e for e in events if e["ph"] == "X"]
    begins = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert begins.keys() == ends.keys()
    assert len(begins) == 2 * 3

    def slice_at(event):
        (found,) = (
            e
            for e in slices
            if (e["pid"], e["tid"]) == (event["pid"], event["tid"])
            and e["ts"] <= event["ts"] < e["ts"] + e["dur"]
        )
        return Action.parse(found["name"])

    for identity, event in begins.items():
        send, receive = slice_at(event), slice_at(ends[identity])
        assert send.microbatch == receive.microbatch
        assert abs(send.stage - receive.stage) == 1
        assert send.kind.value[-1] == receive.kind.value[-1]


def test_perfetto_reads_the_trace(tmp_path):
    processor = pytest.importorskip("perfetto.trace_processor")
    path = tmp_path / "trace.json"
    path.write_text(trace_text(with_transfers(measured(schedule_of("1F1B", 2, 3, unit=0.1)))))
    try:
        trace = processor.TraceProcessor(trace=str(path))
    except Exception as error:  # its program is downloaded at first use
        pytest.skip(f"Perfetto's trace processor cannot be started: {error}")
    with trace:
        rows = list(trace.query("select name, dur from slice where category = 'forward' order by ts"))
        assert sorted(row.name for row in rows) == ["0F0", "0F1", "0F2", "1F0", "1F1", "1F2"]
        assert len(list(trace.query("select * from flow"))) == 6
