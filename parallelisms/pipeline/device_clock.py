"""When a CUDA device really did its work: events on its streams, related to the host's monotonic clock.

The host only enqueues: a time that it takes tells when work was handed over, not when it ran. A mark is a CUDA
event on the current stream, which the device stamps when it comes to it. `Work.wait()` of a receive makes the
current stream wait and not the host, so an event before it and one after it are stamped at the begin and at
the end of the wait.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_ROUNDS = 8  # of relating the device's clock to the host's; the best one counts
_RESOLUTION_NS = 1_000  # of elapsed_time: about half a microsecond, more for steps of ten seconds and longer


@dataclass(frozen=True)
class Readings:
    """Marks as times in ns on the host's monotonic clock, each off by at most `bound_ns`."""

    times: tuple[int, ...]
    bound_ns: int


class CudaClock:
    """Marks are CUDA events, reused from step to step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._used = 0

    def start(self) -> None:
        """A step begins: earlier marks are void."""
        self._used = 0
        self.mark()  # the base from which the others are measured

    def mark(self) -> torch.cuda.Event:
        """A mark at this point of the current stream."""
        if self._used == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))
        event = self._events[self._used]
        self._used += 1
        event.record(torch.cuda.current_stream(self._device))
        return event

    def read(self, marks: Sequence[torch.cuda.Event]) -> Readings:
        """The times of marks taken since `start`; waits until the device has come to them."""
        base = self._events[0]
        base_ns, bound_ns = self._relate(base)
        return Readings(tuple(base_ns + _elapsed_ns(base, mark) for mark in marks), bound_ns)

    def _relate(self, base: torch.cuda.Event) -> tuple[int, int]:
        """The host's time at `base`, and the bound of its error.

        After the first round the stream is idle. An event that is then recorded and waited for is stamped
        between the host's times before and after; their middle is off by half of what lies between at most.
        """
        shortest, base_ns = 0, 0
        for each in range(_ROUNDS + 1):
            before = time.monotonic_ns()
            event = self.mark()
            event.synchronize()
            after = time.monotonic_ns()
            if each == 0:
                continue  # this one waited for the step's work
            if each == 1 or after - before < shortest:
                shortest = after - before
                base_ns = (before + after) // 2 - _elapsed_ns(base, event)
        return base_ns, shortest // 2 + _RESOLUTION_NS


def _elapsed_ns(base: torch.cuda.Event, mark: torch.cuda.Event) -> int:
    return round(base.elapsed_time(mark) * 1e6)
