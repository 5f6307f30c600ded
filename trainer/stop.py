"""Requests to stop: SIGTERM, SIGINT or SIGUSR1 ends a run after the step in progress, its state saved.

A signal that reaches one rank is only noted there. All ranks hear of it in a reduction that each step makes
anyway, so they stop after the same step. A second signal, of whatever kind, ends the process at once, with two
exceptions:

- What comes within two seconds is the same request: Ctrl-C reaches every process of a terminal, SLURM every process
  of a job, and a launcher (torchrun, srun) passes it on to those that have it already.
- SIGTERM after SIGUSR1: SLURM sends the one ahead of a time limit (`--signal=USR1@120`) and the other at the limit,
  when the state may be half saved. It counts as the first SIGTERM.

The interpreter runs handlers in the main thread only, which may stand in a collective. A thread of its own reads
the signals' numbers from a socket, which the interpreter writes to as soon as they arrive.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Self

from trainer.errors import ExitCode, StoppedOnRequest

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
SAME_REQUEST = 2.0  # seconds


class Meaning(Enum):
    """What a signal says, after those before it."""

    STOP = auto()
    NOTHING_NEW = auto()
    AT_ONCE = auto()


@dataclass
class Requests:
    """The signals of a process, of which the first is a request and a second one means it."""

    first: int | None = None
    _last: int = 0
    _since: float = 0.0

    def receive(self, number: int, now: float) -> Meaning:
        """Take a signal that came at `now`, in seconds of any clock that only goes forward."""
        if self.first is None:
            self.first, self._last, self._since = number, number, now
            return Meaning.STOP
        if now - self._since <= SAME_REQUEST:
            return Meaning.NOTHING_NEW
        if (self._last, number) == (signal.SIGUSR1, signal.SIGTERM):
            self._last, self._since = number, now
            return Meaning.NOTHING_NEW
        return Meaning.AT_ONCE


class StopRequest:
    """Whether this process has been asked to stop."""

    def __init__(self) -> None:
        """Nobody has asked, and until `listen` nobody can."""
        self._requests = Requests()
        self._end: Callable[[StoppedOnRequest], None] | None = _end_before_training

    @classmethod
    def listen(cls) -> Self:
        """Take over the signals of this process; from its main thread."""
        request = cls()
        reading, writing = socket.socketpair()
        writing.setblocking(False)
        for number in SIGNALS:
            signal.signal(number, _noted_elsewhere)
        signal.set_wakeup_fd(writing.detach(), warn_on_full_buffer=False)
        # A helper process that is forked is asked to end on its own account. Until it has other handlers it would
        # write to the socket of this one.
        os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_listen_no_more)
        threading.Thread(target=request._read, args=(reading,), name="stop requests", daemon=True).start()
        return request

    @property
    def asked(self) -> bool:
        return self._requests.first is not None

    @property
    def name(self) -> str:
        """What asked first, e.g. SIGTERM; on a rank that heard of it from another, so much."""
        number = self._requests.first
        return "a signal to another rank" if number is None else signal.Signals(number).name

    def end_with(self, end: Callable[[StoppedOnRequest], None]) -> None:
        """From now on a request ends the job at once, through `end`: there is nothing yet to be saved."""
        self._end = end

    def note_only(self) -> None:
        """From now on a request waits for the loop to look at `asked`."""
        self._end = None

    def _read(self, reading: socket.socket) -> None:
        while numbers := reading.recv(64):
            for number in numbers:
                if number in SIGNALS:
                    self._receive(number)

    def _receive(self, number: int) -> None:
        meaning = self._requests.receive(number, time.monotonic())
        if meaning is Meaning.STOP and self._end is not None:
            self._end(
                StoppedOnRequest(f"stopped by {self.name} before training began; nothing was to be saved")
            )
        elif meaning is Meaning.AT_ONCE:
            print(
                f"stageline: ended at once by a second signal, {signal.Signals(number).name}", file=sys.stderr
            )
            os._exit(ExitCode.OTHER)


def _end_before_training(reason: StoppedOnRequest) -> None:
    """Before there is a process group through which one rank could speak for all."""
    if os.environ.get("RANK", "0") == "0":
        print(reason, file=sys.stderr)
    os._exit(reason.exit_code)


def _noted_elsewhere(*_: object) -> None:
    """The handler: without one in Python the interpreter would not pass the signal on to the thread."""


def _listen_no_more() -> None:
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        if signal.getsignal(number) is _noted_elsewhere:
            signal.signal(number, signal.SIG_DFL)
    _unblock()


def _block() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
