"""A limit of wall-clock time: the run ends, its state saved, while there is still time for that.

Each rank asks once in every step, at the same place; what any of them answers, all of them hear. The answer is from
what was measured in this run: another step, the slowest of late, and a save, must still fit.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable

STARTED = "STAGELINE_STARTED"
"""Environment variable: when the job began, in seconds since 1970. The launcher sets it, so that its restarts share
one limit; a batch script may."""

_STEPS = 50  # of which the slowest counts: among them a validation, a slow read
_SAVES = 2.0  # twice the slowest save: file systems are slow at times, and a save may be under way already
_AT_THE_END = (
    10.0  # seconds to leave the process group and close files, or a tenth of the limit, if that is less
)


class TimeLimit:
    """What `[job] time_limit` asks for, on one rank."""

    def __init__(
        self, seconds: float | None, first_save: float, clock: Callable[[], float] = time.time
    ) -> None:
        """
        Args:
            seconds: from the job's beginning to its end; None: no limit.
            first_save: seconds that a save is thought to take before any was made.
            clock: seconds since 1970.
        """
        self._clock = clock
        started = os.environ.get(STARTED, "")
        began = float(started) if started.isdecimal() else clock()
        self._end = None if seconds is None else began + seconds - min(_AT_THE_END, seconds / 10)
        self._save = first_save
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._before: float | None = None
        self._saving = 0.0  # seconds since `_before` in which training waited for a save

    def saved(self, slowest: float, waited: float) -> None:
        """After each step: how long the slowest save took (0: none was made), and how long the step waited for one."""
        if slowest > 0:
            self._save = slowest
        self._saving += waited

    def reached(self) -> bool:
        """Whether the step in progress must be the last one. To be asked once in each step."""
        if self._end is None:
            return False
        now = self._clock()
        if self._before is not None:
            self._steps.append(now - self._before - self._saving)
        self._before, self._saving = now, 0.0
        return now + max(self._steps, default=0.0) + _SAVES * self._save > self._end
