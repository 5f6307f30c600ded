"""Requests to stop: SIGTERM, SIGINT or SIGUSR1 ends a run after the step in progress, its state saved.

A signal that reaches one rank is only noted there. All ranks hear of it in a reduction that each step makes
anyway, so they stop after the same step. The same signal once more ends the process at once. A second signal of
another kind does not: SLURM sends SIGUSR1 ahead of a time limit and SIGTERM at the limit, maybe while the state
is being saved.

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
from typing import Self

from trainer.errors import ExitCode, StoppedOnRequest

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

# Ctrl-C reaches every process of the terminal, and a launcher (torchrun) passes it on to those that have it already.
SAME_REQUEST = 1.0  # seconds


class StopRequest:
    """Whether this process has been asked to stop."""

    def __init__(self) -> None:
        """Nobody has asked, and until `listen` nobody can."""
        self._received: dict[int, float] = {}  # signal number -> when
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
        return bool(self._received)

    @property
    def name(self) -> str:
        """What asked first, e.g. SIGTERM; on a rank that heard of it from another, so much."""
        return next((signal.Signals(number).name for number in self._received), "a signal to another rank")

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
        now = time.monotonic()
        before = self._received.setdefault(number, now)
        if before == now:
            if self._end is not None:
                self._end(
                    StoppedOnRequest(f"stopped by {self.name} before training began; nothing was to be saved")
                )
        elif now - before > SAME_REQUEST:
            print(f"stageline: ended at once by a second {signal.Signals(number).name}", file=sys.stderr)
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
