import time

import pytest
import torch

from parallelisms.pipeline.actions import Action
from parallelisms.pipeline.device_clock import CudaClock
from parallelisms.pipeline.recording import Moment, Note, fold
from parallelisms.pipeline.timeline import TimelineRecorder

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
