import json
import time
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelisms.pipeline.actions import Action, Kind
from parallelisms.pipeline.advice import advise
from parallelisms.pipeline.assemble import ClockOffset, RankReport, assemble
from parallelisms.pipeline.comparison import Cause, compare
from parallelisms.pipeline.costs import costs_of, exposed_transfers, measured_costs
from parallelisms.pipeline.device_clock import CudaClock
from parallelisms.pipeline.figures import measured_figures
from parallelisms.pipeline.measured import MeasuredAction, RankTimeline
from parallelisms.pipeline.recording import Moment, Note, fold
from parallelisms.pipeline.setting import Costs
from parallelisms.pipeline.timeline import TimelineRecorder
from parallelisms.pipeline.timeline_file import TimelineFileError, read_timeline, timeline_text
from parallelisms.pipeline.trace import trace_events, trace_text
from tests.pipeline.synthetic import every_action, measured, schedule_of

F0, SEND, RECEIVE = map(Action.parse, ("1F0", "1SEND_F0", "1RECV_F0"))
CPU = torch.device("cpu")


class Silent:
    def begin(self, action): ...
    def wait(self, action, transfer, peer): ...
    def ready(self, action): ...
    def end(self, action): ...


def note(moment, action, at, host=None, transfer=None, peer=None):
    return Note(moment, action, at, at if host is None else host, transfer, peer)


# Recording


def test_a_wait_and_the_work_after_it_are_told_apart():
    receive, forward, send = fold(
        [
            note(Moment.BEGIN, RECEIVE, 0.0),
            note(Moment.END, RECEIVE, 0.1),
            note(Moment.BEGIN, F0, 0.2),
            note(Moment.WAIT, F0, 0.3, transfer=RECEIVE, peer=5),
            note(Moment.READY, F0, 1.0),
            note(Moment.END, F0, 3.0),
            note(Moment.BEGIN, SEND, 3.1),
            note(Moment.END, SEND, 3.2),
            note(Moment.END, SEND, 4.0),
        ]
    )
    assert (forward.wait_start, forward.wait_end, forward.waits_for, forward.peer) == (0.3, 1.0, RECEIVE, 5)
    assert (forward.start, forward.end, forward.waited, forward.came) == (1.0, 3.0, 0.7, 0.3)
    # The message was there when the work could begin; the send was noticed to be complete later.
    assert (receive.start, receive.end) == (0.0, 1.0)
    assert (send.start, send.end, send.wait_start) == (3.1, 4.0, None)


def test_a_send_that_is_waited_for_at_the_end_ends_with_the_wait():
    (send,) = fold(
        [
            note(Moment.BEGIN, SEND, 1.0),
            note(Moment.END, SEND, 1.1),
            note(Moment.WAIT, SEND, 5.0, transfer=SEND, peer=2),
            note(Moment.END, SEND, 6.0),
        ]
    )
    assert (send.start, send.end, send.wait_start, send.wait_end) == (1.0, 6.0, 5.0, 6.0)


def test_runs_of_the_same_list_within_a_step_are_counted():
    notes = [note(moment, F0, at) for at in (0.0, 1.0) for moment in (Moment.BEGIN, Moment.READY, Moment.END)]
    assert [(each.run, each.start) for each in fold(notes)] == [(0, 0.0), (1, 1.0)]
    assert [str(each.numbered(8)) for each in fold(notes)] == ["1F0", "1F8"]


def test_the_recorder_passes_everything_on_whether_it_records_or_not():
    class Told(Silent):
        def __init__(self):
            self.calls = []

        def begin(self, action):
            self.calls.append(("begin", action))

        def wait(self, action, transfer, peer):
            self.calls.append(("wait", action, transfer, peer))

        def ready(self, action):
            self.calls.append(("ready", action))

        def end(self, action):
            self.calls.append(("end", action))

    told = Told()
    recorder = TimelineRecorder(told, CPU)
    for _ in range(2):
        recorder.begin(F0), recorder.wait(F0, RECEIVE, 3), recorder.ready(F0), recorder.end(F0)
        recorder.start()
    once = [("begin", F0), ("wait", F0, RECEIVE, 3), ("ready", F0), ("end", F0)]
    assert told.calls == once * 2
    recorder.abandon()
    with pytest.raises(RuntimeError, match="without start"):
        recorder.stop()


def test_recording_takes_microseconds_and_less_when_it_is_off():
    def per_action(recorder, count=3000):
        begin = time.perf_counter()
        for _ in range(count):
            recorder.begin(F0), recorder.ready(F0), recorder.end(F0)
        return (time.perf_counter() - begin) / count

    off = TimelineRecorder(Silent(), CPU)
    on = TimelineRecorder(Silent(), CPU)

    def recorded():
        on.start()
        return per_action(on)

    per_action(off)
    best_off, best_on = min(per_action(off) for _ in range(5)), min(recorded() for _ in range(5))
    # 1% of actions of a millisecond; those of real models take ten times as long and more.
    assert best_on < 10e-6
    assert best_off < 2e-6


# The clock of a device that works on its own


class FakeDevice:
    """A stream with a clock of its own, whose work is done one after the other, later than it is enqueued.

    Its clock begins elsewhere than the host's, and every call of the host takes a microsecond.
    """

    AHEAD = 7_000_000_000

    def __init__(self):
        self.host_ns = 50_000
        self.done_ns = 0  # when the stream will be through with what it was given

    def now(self):
        self.host_ns += 1_000
        return self.host_ns

    def work(self, ns):
        self.done_ns = max(self.done_ns, self.host_ns) + ns

    def wait_until(self, ns):
        self.done_ns = max(self.done_ns, self.host_ns, ns)

    def event(self, enable_timing=False):
        device = self

        class Event:
            def record(self, stream):
                device.host_ns += 1_000
                device.done_ns = max(device.done_ns, device.host_ns)
                self.at = device.done_ns + device.AHEAD

            def synchronize(self):
                device.host_ns = max(device.host_ns, self.at - device.AHEAD) + 1_000

            def elapsed_time(self, other):
                return (other.at - self.at) / 1e6

        assert enable_timing
        return Event()


@pytest.fixture
def device(monkeypatch):
    fake = FakeDevice()
    monkeypatch.setattr(torch.cuda, "Event", fake.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a device")
    monkeypatch.setattr(time, "monotonic_ns", fake.now)
    return fake


def test_times_of_a_device_are_when_it_worked_and_not_when_work_was_enqueued(device):
    recorder = TimelineRecorder(Silent(), torch.device("cuda", 0))
    recorder.start()
    begin = device.host_ns
    recorder.begin(RECEIVE), recorder.end(RECEIVE)
    recorder.begin(F0)
    recorder.wait(F0, RECEIVE, 1)
    device.wait_until(begin + 2_000_000)  # the message comes after 2 ms; the host goes on at once
    recorder.ready(F0)
    device.work(5_000_000)
    recorder.end(F0)
    recorder.begin(SEND), recorder.end(SEND)
    enqueued_after = device.host_ns - begin
    result = recorder.stop()
    receive, forward, send = result.actions
    error = result.clock_bound + 5e-6
    assert enqueued_after < 100_000  # the host was through long before
    assert result.device == "a device"
    assert 0 < result.clock_bound < 20e-6
    assert forward.wait_start == pytest.approx(0.0, abs=20e-6)
    assert forward.wait_end == pytest.approx(2e-3, abs=error)
    assert (forward.start, forward.end) == pytest.approx((2e-3, 7e-3), abs=error)
    assert receive.end == forward.start
    assert forward.enqueued is not None
    assert forward.enqueued < 100e-6
    # The send was posted on a stream that was at work until then.
    assert send.start == pytest.approx(7e-3, abs=error)


def test_events_are_reused_from_step_to_step(device):
    clock = CudaClock(torch.device("cuda", 0))
    for _ in range(3):
        clock.start()
        clock.read([clock.mark() for _ in range(5)])
        first = len(clock._events)
    assert first == len(clock._events) == 1 + 5 + 9


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_time_of_a_kernel_is_measured_and_not_its_launch():
    recorder = TimelineRecorder(Silent(), torch.device("cuda", 0))
    a = torch.randn(8192, 8192, device="cuda")
    a @ a
    torch.cuda.synchronize()
    recorder.start()
    host = time.perf_counter()
    recorder.begin(F0), recorder.ready(F0)
    for _ in range(20):
        a @ a
    recorder.end(F0)
    launched = time.perf_counter() - host
    (forward,) = recorder.stop().actions
    whole = time.perf_counter() - host
    assert launched < 0.5 * forward.seconds
    assert 0.5 * whole < forward.seconds <= whole
    assert -1e-3 < forward.start - (forward.enqueued or 0.0) < 5e-3


# Putting ranks together


def report(rank, actions, origin_ns, offset_ns=0, bound_ns=0, boot="a", measured_ns=0):
    timeline = RankTimeline(tuple(actions), origin_ns, "cpu", "clock", 1e-6 * rank)
    return RankReport(
        rank, rank, 0, f"host{rank}", boot, ClockOffset(offset_ns, bound_ns, measured_ns), timeline
    )


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


# Costs and figures


def test_measured_costs_are_those_that_the_stages_had():
    costs = Costs((1.0, 2.0, 3.0), (2.0, 1.0, 2.0), (1.0, 1.0, 4.0), 0.5)
    schedule = schedule_of("ZB-H1", 3, 7)
    found = measured_costs(measured(schedule, costs))
    assert found.forward == pytest.approx(costs.forward)
    assert found.backward_input == pytest.approx(costs.backward_input)
    assert found.backward_weight == pytest.approx(costs.backward_weight)
    assert found.transfer == pytest.approx(0.5)


def test_a_backward_in_one_go_is_shared_by_halves():
    found = measured_costs(measured(schedule_of("1F1B", 2, 3), Costs((1, 1), (1, 2), (3, 2))))
    assert found.backward_input == (2, 2)
    assert found.backward_weight == (2, 2)


def test_one_slow_microbatch_does_not_change_the_costs():
    found = measured_costs(measured(schedule_of("1F1B", 2, 5), delays={"1F2": 30.0}))
    assert found.forward == pytest.approx((1.0, 1.0))


def test_what_the_host_needs_between_two_actions_is_part_of_their_cost():
    # One rank goes F0 B0 F1 B1 ...: the pause is after each backward but the last.
    timeline = measured(schedule_of("1F1B", 1, 4), pauses={f"0F{m}": 0.5 for m in range(1, 4)})
    found = measured_costs(timeline)
    assert found.forward == (1.0,)
    assert found.backward_input[0] + found.backward_weight[0] == pytest.approx((3 * 2.5 + 2.0) / 4)
    assert timeline.schedule.simulate(found).step == pytest.approx(measured_figures(timeline, 0).step)


def test_the_plan_is_scaled_by_what_most_actions_took():
    schedule = schedule_of("1F1B", 4, 8)  # in units; measured in seconds
    costs = Costs((0.01, 0.01, 0.05, 0.01), (0.01,) * 4, (0.01,) * 4)
    timeline = measured(schedule, costs)
    reports = [report(rank.rank, rank.actions, 0, measured_ns=0) for rank in timeline.ranks]
    assembled = assemble(1, reports, schedule)
    assert assembled.plan_costs.forward == pytest.approx((0.01,) * 4)
    assert assembled.plan().step == pytest.approx(0.33)


@pytest.mark.parametrize("transfer", [0.0, 0.25])
def test_the_costs_of_a_prediction_are_found_again(transfer):
    schedule = schedule_of("ZBVZeroBubble", 4, 8, transfer=transfer)
    found = costs_of(schedule.prediction, schedule.placement)
    assert found == Costs.equal(8, 0.5, 0.5, 0.5, transfer)


def test_figures_of_what_was_measured_as_planned_are_those_of_the_plan():
    schedule = schedule_of("1F1B", 4, 8)
    figures = measured_figures(measured(schedule), 0)
    assert figures.step == pytest.approx(33)
    assert figures.bound == pytest.approx(33)
    assert figures.step_bubble == pytest.approx(schedule.prediction.step_bubble)
    assert figures.rank_bubbles == pytest.approx(schedule.prediction.rank_bubbles)
    assert figures.peak_activations == schedule.prediction.peak_activations
    assert sum(figures.exposed) == 0


def test_exposed_communication_is_what_is_waited_for_after_a_message_was_made():
    timeline = measured(schedule_of("1F1B", 2, 1), Costs.equal(2, transfer=0.25))
    found = exposed_transfers(timeline, timeline.pipeline(0))
    assert [(str(each.action), each.seconds, each.whole) for each in found] == [
        ("0B0", 0.25, True),
        ("1F0", 0.25, True),
    ]
    assert measured_figures(timeline, 0).exposed == (0.25, 0.25)


# What differs from the plan


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_nothing_is_late_when_everything_went_as_planned(name):
    comparison = compare(measured(schedule_of(name, 4, 6, unit=0.02)))
    assert comparison.late == ()
    assert comparison.measured_step == pytest.approx(comparison.planned_step)
    assert all(each.ratio == pytest.approx(1.0) for each in comparison.stages)


def test_a_slow_stage_is_found_and_the_waiting_it_causes_is_traced_to_it():
    schedule = schedule_of("1F1B", 4, 8, unit=0.01)
    costs = Costs((0.01, 0.01, 0.02, 0.01), (0.01,) * 4, (0.01,) * 4)
    comparison = compare(measured(schedule, costs))
    first = comparison.groups()[0]
    assert [str(each.action) for each in first.actions] == [f"2F{m}" for m in range(8)]
    assert {each.cause for each in first.actions} == {Cause.SLOW_STAGE}
    assert first.lost == pytest.approx(0.08)
    others = [each for each in comparison.late if each.rank != 2]
    assert others
    for each in others:
        assert each.cause is Cause.LATE_RECEIVE
        assert each.origin is not None
        assert (each.origin.stage, each.origin_rank) == (2, 2)
    slow = max(comparison.stages, key=lambda each: each.ratio)
    assert (slow.stage, slow.kind.value, slow.ratio) == (2, "F", pytest.approx(2.0))


def test_an_action_that_was_slow_once_is_told_from_a_slow_stage():
    comparison = compare(measured(schedule_of("1F1B", 4, 8, unit=0.01), delays={"1B3": 0.04}))
    worst = comparison.groups()[0].actions[0]
    assert (str(worst.action), worst.cause, worst.lost) == ("1B3", Cause.SLOW_ONCE, pytest.approx(0.04))
    assert set(comparison.lost_by_cause()) == {Cause.SLOW_ONCE, Cause.LATE_RECEIVE}


def test_a_rank_that_had_its_input_and_did_not_begin_is_host_bound():
    comparison = compare(measured(schedule_of("1F1B", 2, 4, unit=0.01), pauses={"0F1": 0.03}))
    worst = comparison.groups()[0].actions[0]
    assert (str(worst.action), worst.cause, worst.lost) == ("0F1", Cause.HOST_BOUND, pytest.approx(0.03))


def test_a_message_that_was_long_on_its_way_is_no_fault_of_its_sender():
    schedule = schedule_of("1F1B", 2, 1, unit=0.01)
    comparison = compare(measured(schedule, Costs.equal(2, 0.01, 0.01, 0.01, transfer=0.02)))
    assert {str(each.action): each.cause for each in comparison.late} == {
        "1F0": Cause.SLOW_TRANSFER,
        "0B0": Cause.SLOW_TRANSFER,
    }


def test_what_the_clocks_cannot_tell_is_not_called_late():
    timeline = measured(schedule_of("1F1B", 2, 4, unit=0.01), pauses={"0F1": 0.003})
    assert compare(timeline).late
    assert not compare(replace(timeline, clock_bound=0.002)).late


def test_a_pipeline_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="no pipeline 7; there are 0"):
        compare(measured(schedule_of("1F1B", 2, 2)), 7)


def test_the_fastest_schedule_for_the_measured_costs_is_named_with_its_gain():
    advice = advise(measured(schedule_of("1F1B", 4, 8, unit=0.01)))
    assert advice.current.name == "1F1B"
    assert advice.current.step == pytest.approx(0.33)
    # 27 against 33, with the same memory: the bound of one stage per rank.
    assert advice.best.step == pytest.approx(0.27)
    assert advice.best.peak_share <= 4
    assert advice.gain(advice.best) == pytest.approx(6 / 33)
    assert advice.fastest.step <= advice.best.step
    assert advice.auto is not None
    assert advice.auto.step <= advice.best_named.step


def test_advice_keeps_the_stages_as_they_are():
    advice = advise(measured(schedule_of("Interleaved1F1B", 4, 8, unit=0.01)))
    assert {each.placement.stages for each in advice.others} == {8}
    assert {each.name for each in advice.others} >= {"LoopedBFS", "ZBVZeroBubble"}
    assert "1F1B" not in {each.name for each in advice.others}


def test_times_of_all_actions_shift_together():
    timeline = measured(schedule_of("1F1B", 2, 2))
    moved = every_action(timeline, lambda each: each.shifted(5.0))
    for rank, before in zip(moved.ranks, timeline.ranks, strict=True):
        for after, original in zip(rank.actions, before.actions, strict=True):
            assert after.start == original.start + 5
            assert after.waited == pytest.approx(original.waited)
