"""What this rank is doing right now: written by the loop and the executor, read by the watchdog."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

from parallelisms.pipeline.actions import Action


@dataclass(frozen=True)
class Status:
    """One thing a rank does: a phase of the step, or an action of the pipeline schedule.

    `since` is on this host's monotonic clock. `peer` is the global rank that is waited for; `collective` says
    that other ranks are waited for without knowing which. `patient` phases (start-up, checkpoints) may take
    as long as start-up may.
    """

    step: int
    doing: str
    since: float
    waits_for: str | None = None
    peer: int | None = None
    collective: bool = False
    patient: bool = False

    @property
    def waiting(self) -> bool:
        return self.peer is not None or self.collective

    def sentence(self) -> str:
        """The status as words."""
        where = f"step {self.step}, {self.doing}"
        if self.peer is not None:
            return f"{where}, waiting for {self.waits_for} with rank {self.peer}"
        return f"{where}, waiting for the other ranks" if self.collective else where

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


class Progress:
    """The current status; also the executor's observer. Assignment of one attribute needs no lock."""

    def __init__(self) -> None:
        self.status = Status(0, "starting", time.monotonic(), patient=True)

    def phase(
        self,
        doing: str,
        *,
        step: int | None = None,
        peer: int | None = None,
        collective: bool = False,
        patient: bool = False,
    ) -> None:
        """The loop enters a phase, e.g. "reading data"; with `peer`, one that this global rank has to enter too."""
        step = self.status.step if step is None else step
        waits_for = None if peer is None else "the same"
        self.status = Status(step, doing, time.monotonic(), waits_for, peer, collective, patient)

    def begin(self, action: Action) -> None:
        self.status = Status(self.status.step, str(action), time.monotonic(), patient=self.status.step <= 1)

    def wait(self, action: Action, transfer: Action, peer: int) -> None:
        step = self.status.step
        self.status = Status(step, str(action), time.monotonic(), str(transfer), peer, patient=step <= 1)

    def ready(self, action: Action) -> None:
        self.begin(action)

    def end(self, action: Action) -> None:
        """The next `begin` or `phase` follows at once."""
