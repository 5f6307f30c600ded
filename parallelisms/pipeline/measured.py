"""What was measured of one step: when every rank did what, and for what it waited.

Plain data without torch, made by `timeline.TimelineRecorder` on every rank, brought onto one clock by
`trainer.timeline`, kept in `timeline/step-N.json` (`timeline_file`), drawn by `picture`, and held against the
plan by `comparison`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from parallelisms.pipeline.actions import Action, ActionLists
from parallelisms.pipeline.setting import Costs, Placement
from parallelisms.pipeline.simulate import Prediction, simulate


@dataclass(frozen=True, slots=True)
class MeasuredAction:
    """One action that a rank carried out; times in seconds.

    Attributes:
        action: what was done.
        start: when its own work began: of a compute action after its input was there, of a send or receive
            when it was posted.
        end: when its work was done. Of a send: when the executor noticed that it was complete; of a receive:
            when the action that uses the message could begin (the message was there by then).
        run: which run of the schedule within the step, from 0 (more than one under gradient accumulation).
        wait_start, wait_end: between these the rank stood still for this action; None if it did not wait.
        waits_for: the transfer that it waited for.
        peer: the global rank on the other side of that transfer.
        enqueued: when the host handed the work to the device; None where the host does the work itself.
    """

    action: Action
    start: float
    end: float
    run: int = 0
    wait_start: float | None = None
    wait_end: float | None = None
    waits_for: Action | None = None
    peer: int | None = None
    enqueued: float | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def waited(self) -> float:
        """Seconds for which the rank stood still for this action."""
        if self.wait_start is None or self.wait_end is None:
            return 0.0
        return self.wait_end - self.wait_start

    @property
    def came(self) -> float:
        """When the rank came to the action: the begin of its wait, or of its work."""
        return self.start if self.wait_start is None else min(self.start, self.wait_start)

    def shifted(self, seconds: float) -> MeasuredAction:
        """The same on a clock that shows `seconds` more."""
        return replace(
            self,
            start=self.start + seconds,
            end=self.end + seconds,
            wait_start=None if self.wait_start is None else self.wait_start + seconds,
            wait_end=None if self.wait_end is None else self.wait_end + seconds,
            enqueued=None if self.enqueued is None else self.enqueued + seconds,
        )

    def numbered(self, microbatches: int) -> Action:
        """The action with its microbatch counted through all runs of the step: unique within the step."""
        if self.action.microbatch is None or self.run == 0:
            return self.action
        return replace(self.action, microbatch=self.action.microbatch + self.run * microbatches)


@dataclass(frozen=True)
class RankTimeline:
    """What one rank recorded of one step.

    The times of `actions` are seconds since `origin_ns` on this host's monotonic clock, to which the device's
    clock (`clock`) was related with an error of at most `clock_bound` seconds.
    """

    actions: tuple[MeasuredAction, ...]
    origin_ns: int
    device: str
    clock: str
    clock_bound: float = 0.0


@dataclass(frozen=True)
class RankMeasurement:
    """One rank of the job in a timeline; times are on the common clock, from the start of the step.

    `replica` tells the pipelines of a job apart: the data-parallel rank, the same for all ranks of one
    pipeline. `clock_bound` is how far, in seconds, its times may be off against those of rank 0.
    """

    rank: int
    pipeline_rank: int
    replica: int
    host: str
    device: str
    clock_bound: float
    actions: tuple[MeasuredAction, ...]

    @property
    def compute(self) -> tuple[MeasuredAction, ...]:
        """Its compute actions in order."""
        return tuple(each for each in self.actions if each.action.kind.is_compute)


@dataclass(frozen=True)
class MeasuredSchedule:
    """The schedule that was carried out, `runs` times in the step."""

    name: str
    placement: Placement
    microbatches: int
    runs: int
    actions: ActionLists

    def simulate(self, costs: Costs) -> Prediction:
        """The prediction for the whole step: the runs follow each other without a pause.

        The microbatches of later runs are counted on from those before.
        """
        return simulate(tuple(tuple(self._repeat(each)) for each in self.actions), self.placement, costs)

    def _repeat(self, actions: tuple[Action, ...]) -> Iterator[Action]:
        for run in range(self.runs):
            for action in actions:
                if action.microbatch is not None:
                    yield replace(action, microbatch=action.microbatch + run * self.microbatches)


@dataclass(frozen=True)
class Timeline:
    """A measured step of a whole job.

    Attributes:
        step: the number of the optimizer step.
        clock_method: how the clocks of devices and ranks were brought together.
        clock_bound: how far, in seconds, times of two ranks may be off against each other.
        schedule: what was carried out.
        plan_costs: the costs that the plan was made with, scaled by one factor from the plan's unit to seconds.
        ranks: every rank of the job.
    """

    step: int
    clock_method: str
    clock_bound: float
    schedule: MeasuredSchedule
    plan_costs: Costs
    ranks: tuple[RankMeasurement, ...]

    @property
    def replicas(self) -> tuple[int, ...]:
        """The pipelines of the job."""
        return tuple(sorted({each.replica for each in self.ranks}))

    def pipeline(self, replica: int) -> tuple[RankMeasurement, ...]:
        """The ranks of one pipeline, first stage's rank first. Raises ValueError if there is none such."""
        members = sorted(
            (each for each in self.ranks if each.replica == replica), key=lambda each: each.pipeline_rank
        )
        if not members:
            known = ", ".join(map(str, self.replicas))
            raise ValueError(f"step {self.step} has no pipeline {replica}; there are {known}")
        return tuple(members)

    def plan(self) -> Prediction:
        """The plan of the step, in seconds."""
        return self.schedule.simulate(self.plan_costs)
