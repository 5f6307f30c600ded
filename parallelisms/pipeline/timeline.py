"""Records what the executor does, on the device's own clock: the measured timeline of one rank.

The recorder stands between the executor and another observer, to which it passes everything on. Off, it costs
one call and one comparison for each; on, a reading of the clock (on CUDA: an event, about 2 microseconds of
the host) and a tuple. It never waits for the device while a step runs.

What the times mean on CUDA. Marks are stamped by the device between the work before and the work after on the
stream of the model. So a compute action's time is what the device spent on it, and a wait is the time for
which the stream stood still for a message; where the device had nothing to do because the host had not yet
enqueued anything, there is a gap without a wait. Sends and receives run on streams of their own: their begin is
stamped when they are posted; their end is when the rank took note that they were complete, which is later
than it happened. Gathering and reducing parameters run on other streams too: their spans tell what they hold up.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from parallelisms.pipeline.actions import Action
from parallelisms.pipeline.device_clock import CudaClock
from parallelisms.pipeline.execute import Observer
from parallelisms.pipeline.measured import RankTimeline
from parallelisms.pipeline.recording import Moment, Note, fold


@dataclass(slots=True)
class _Raw:
    """A note whose time is not known yet. Without a mark the host's time counts."""

    moment: Moment
    action: Action
    host_ns: int
    mark: torch.cuda.Event | None
    transfer: Action | None = None
    peer: int | None = None


class TimelineRecorder:
    """An observer for `Executor` that records between `start` and `stop`."""

    def __init__(self, inner: Observer, device: torch.device) -> None:
        self._inner = inner
        self._device = device
        self._clock = CudaClock(device) if device.type == "cuda" else None
        self._notes: list[_Raw] | None = None  # None: off
        self._origin_ns = 0

    def start(self) -> None:
        """Record from here on, for one step."""
        if self._clock is not None:
            self._clock.start()
        self._origin_ns = time.monotonic_ns()
        self._notes = []

    def stop(self) -> RankTimeline:
        """Stop, wait for the device, and return what was recorded. Raises RuntimeError if nothing was started."""
        if self._notes is None:
            raise RuntimeError("TimelineRecorder.stop() without start()")
        raw, self._notes = self._notes, None
        if self._clock is None:
            notes = [self._note(each, each.host_ns) for each in raw]
            return RankTimeline(fold(notes), self._origin_ns, "cpu", "the host's monotonic clock")
        readings = self._clock.read([each.mark for each in raw if each.mark is not None])
        times = iter(readings.times)
        notes = [self._note(each, each.host_ns if each.mark is None else next(times)) for each in raw]
        return RankTimeline(
            fold(notes, device_works_alone=True),
            self._origin_ns,
            torch.cuda.get_device_name(self._device),
            "CUDA events",
            readings.bound_ns / 1e9,
        )

    def abandon(self) -> None:
        """Stop without a result, after a step that was not completed."""
        self._notes = None

    # Observer

    def begin(self, action: Action) -> None:
        if self._notes is not None:
            # A compute action is stamped when it waits and when its work starts.
            self._take(Moment.BEGIN, action, on_device=not action.kind.is_compute)
        self._inner.begin(action)

    def wait(self, action: Action, transfer: Action, peer: int) -> None:
        if self._notes is not None:
            self._take(Moment.WAIT, action, transfer=transfer, peer=peer)
        self._inner.wait(action, transfer, peer)

    def ready(self, action: Action) -> None:
        if self._notes is not None:
            self._take(Moment.READY, action)
        self._inner.ready(action)

    def end(self, action: Action) -> None:
        if self._notes is not None:
            self._take(Moment.END, action)
        self._inner.end(action)

    def _take(
        self,
        moment: Moment,
        action: Action,
        *,
        on_device: bool = True,
        transfer: Action | None = None,
        peer: int | None = None,
    ) -> None:
        assert self._notes is not None
        mark = self._clock.mark() if on_device and self._clock is not None else None
        self._notes.append(_Raw(moment, action, time.monotonic_ns(), mark, transfer, peer))

    def _note(self, raw: _Raw, at_ns: int) -> Note:
        at, host = (at_ns - self._origin_ns) / 1e9, (raw.host_ns - self._origin_ns) / 1e9
        return Note(raw.moment, raw.action, at, host, raw.transfer, raw.peer)
