"""The schedule that would be fastest with the costs just measured."""

from __future__ import annotations

from dataclasses import dataclass

from parallelisms.pipeline.costs import measured_costs
from parallelisms.pipeline.errors import ScheduleError
from parallelisms.pipeline.factory import build_schedule
from parallelisms.pipeline.measured import MeasuredSchedule, Timeline
from parallelisms.pipeline.schedules.catalogue import FAMILIES, find
from parallelisms.pipeline.setting import Costs, Placement, Setting
from parallelisms.pipeline.verify import peak_activations

_SEARCH = "Auto"
_EQUAL = 1.001  # steps that differ by less are as long as each other


@dataclass(frozen=True)
class Candidate:
    """A schedule over the same stages, with the step predicted for it, in seconds."""

    name: str
    placement: Placement
    step: float
    peak_share: float  # of the fullest rank, in microbatches of its whole share


@dataclass(frozen=True)
class Advice:
    """The current schedule and the others under measured costs, the fastest first."""

    current: Candidate
    others: tuple[Candidate, ...]

    @property
    def auto(self) -> Candidate | None:
        """What the search for the shortest step within the memory of the current schedule finds."""
        return next((each for each in self.others if each.name == _SEARCH), None)

    @property
    def best(self) -> Candidate:
        """The fastest that holds no more activations than the current one, which it may be itself."""
        return min([self.current, *self._within_memory()], key=lambda each: each.step)

    @property
    def best_named(self) -> Candidate:
        """The same without the search."""
        named = [each for each in self._within_memory() if each.name != _SEARCH]
        return min([self.current, *named], key=lambda each: each.step)

    @property
    def fastest(self) -> Candidate:
        """The fastest, whatever it holds; of equals the one that holds least."""
        shortest = min(each.step for each in (self.current, *self.others))
        as_fast = [each for each in (self.current, *self.others) if each.step <= shortest * _EQUAL]
        return min(as_fast, key=lambda each: each.peak_share)

    def _within_memory(self) -> list[Candidate]:
        return [each for each in self.others if each.peak_share <= self.current.peak_share + 1e-9]

    def gain(self, candidate: Candidate) -> float:
        """The share of the step that the candidate would save."""
        return 1.0 - candidate.step / self.current.step if self.current.step > 0 else 0.0


def advise(timeline: Timeline) -> Advice:
    """Predict every schedule of the catalogue for the measured stages and costs.

    The stages stay as they are, and with them the number of stages per rank; schedules that place them
    otherwise (down and up again) are tried as well, since what a stage costs does not depend on where it is.
    """
    costs = measured_costs(timeline)
    measured = timeline.schedule
    current = _current(measured, costs)
    others = [
        candidate
        for family in FAMILIES
        if (candidate := _candidate(family.name, measured, costs, current.peak_share)) is not None
    ]
    return Advice(current, tuple(sorted(others, key=lambda each: each.step)))


def _current(measured: MeasuredSchedule, costs: Costs) -> Candidate:
    one_run = MeasuredSchedule(measured.name, measured.placement, measured.microbatches, 1, measured.actions)
    shares = [
        peak_activations(actions) / max(1, len(measured.placement.stages_of(rank)))
        for rank, actions in enumerate(measured.actions)
    ]
    return Candidate(measured.name, measured.placement, one_run.simulate(costs).step, max(shares))


def _candidate(name: str, measured: MeasuredSchedule, costs: Costs, peak: float) -> Candidate | None:
    """None where the schedule does not exist for these stages."""
    ranks = measured.placement.ranks
    each, rest = divmod(measured.placement.stages, ranks)
    if rest:
        return None
    try:
        placement = find(name).place(ranks, each)
        # The cap is for schedules that search under one; others that exceed it are refused, and tried again
        # without it, so that their gain can be told beside what they hold.
        try:
            schedule = build_schedule(name, Setting(placement, measured.microbatches, costs, peak))
        except ScheduleError:
            schedule = build_schedule(name, Setting(placement, measured.microbatches, costs))
    except ScheduleError:
        return None
    return Candidate(schedule.name, placement, schedule.prediction.step, max(schedule.proof.peak_share))
