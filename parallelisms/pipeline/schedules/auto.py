"""Auto: the shortest step that can be found for the given placement, costs of each stage, and memory cap.

It takes what all other schedules of this placement give, if it fits into the cap, and greedy schedules by
twelve rules (`list_scheduling`); closes the gaps of each (`justification`); and shakes the best two
(`search.shake`). The shortest of all wins, of equally short ones that which holds the fewest activations.
So Auto is never longer than the best of the others under the same cap and placement, and it gives an answer
for every cap from one microbatch on. For equal stages the published schedules are mostly optimal already;
Auto gains where stages are uneven, where f, b and w differ, and where memory is short.

Backwards are split in the search; in the result I and W that follow each other are one B wherever the stage
before does not need the gradient sooner.

The amount of search is fixed by the number of operations and stops early at the lower bound: up to one or two
seconds for p = 8, m = 32, less for what is smaller; for larger settings fewer rules and fewer shakes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from parallelisms.pipeline.actions import ActionLists
from parallelisms.pipeline.bounds import lower_bound
from parallelisms.pipeline.communicate import add_communication
from parallelisms.pipeline.errors import IllegalSettingError
from parallelisms.pipeline.schedules import (
    dualpipev,
    gpipe,
    interleaved,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    v_schedules,
    zbv,
    zero_bubble,
)
from parallelisms.pipeline.schedules.family import ScheduleFamily
from parallelisms.pipeline.schedules.justification import justify
from parallelisms.pipeline.schedules.operations import Operations, Timed, join_backwards, timed
from parallelisms.pipeline.schedules.search import greedy_schedules, shake
from parallelisms.pipeline.setting import Setting
from parallelisms.pipeline.simulate import simulate

# In operations, for all greedy schedules together and for all shakes of one schedule.
_GREEDY_BUDGET = 24_000
_SHAKE_BUDGET = 24_000
_SHAKEN = 2

_OTHERS = (
    one_f_one_b.FAMILY,
    *zero_bubble.FAMILIES,
    interleaved.FAMILY,
    interleaved_zero_bubble.FAMILY,
    zbv.FAMILY,
    dualpipev.FAMILY,
    *v_schedules.FAMILIES,
    gpipe.FAMILY,
    looped_bfs.FAMILY,
)


@dataclass(frozen=True)
class _Candidate:
    """A schedule of the search, and the most activations that a rank holds in it."""

    schedule: Timed
    peak: int

    @property
    def rank(self) -> tuple[int, int]:
        return self.schedule.step, self.peak


def auto(setting: Setting) -> ActionLists:
    """The compute actions of each rank."""
    operations = Operations.of(setting, setting.memory_cap)
    published = [lists for lists in _published(setting) if operations.fits(operations.numbered(lists))]
    found = _search(operations, published)
    results = [join_backwards(operations, found), operations.actions(operations.orders(found.starts))]
    # The search knows messages by their duration only; the simulation also knows when they are posted.
    return min([*results, *published], key=lambda lists: _predicted_step(setting, lists))


def _published(setting: Setting) -> Iterator[ActionLists]:
    for family in _OTHERS:
        try:
            family.check(setting)
        except IllegalSettingError:
            continue
        yield family.generate(setting)


def _search(operations: Operations, published: list[ActionLists]) -> Timed:
    goal = _goal(operations)
    candidates: list[_Candidate] = []

    def best() -> list[_Candidate]:
        return sorted(candidates, key=lambda each: each.rank)[:_SHAKEN]

    for lists in published:
        start = timed(operations, operations.numbered(lists), operations.durations)
        candidates.append(_candidate(operations, start))
        candidates.append(_candidate(operations, justify(operations, start, operations.durations)))
    if candidates and best()[0].schedule.step <= goal:
        return best()[0].schedule
    for schedule in greedy_schedules(operations, _GREEDY_BUDGET):
        candidates.append(_candidate(operations, schedule))
        if schedule.step <= goal:
            return schedule
    shaken = [
        _candidate(operations, shake(operations, each.schedule, _SHAKE_BUDGET, goal)) for each in best()
    ]
    return min(shaken, key=lambda each: each.rank).schedule


def _candidate(operations: Operations, schedule: Timed) -> _Candidate:
    return _Candidate(schedule, max(operations.peaks(operations.orders(schedule.starts))))


def _goal(operations: Operations) -> int:
    """The lower bound in ticks, a little more for what rounding to ticks may add."""
    setting = operations.setting
    bound = lower_bound(setting.placement, setting.costs, setting.microbatches, splits_backward=True)
    return round(bound / operations.unit * (1 + 1e-6))


def _predicted_step(setting: Setting, lists: ActionLists) -> float:
    return simulate(add_communication(lists, setting.placement), setting.placement, setting.costs).step


FAMILY = ScheduleFamily(
    name="Auto",
    generate=auto,
    placement="any",
    splits_backward=True,
    summary="the shortest step found under the memory limit, for the costs of each stage",
)
