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

from collections.abc import Iterable, Iterator, Sequence
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

# How many operations may be looked at: in closing up published schedules, in greedy schedules, in the shakes of
# one schedule.
_CLOSING_BUDGET = 24_000
_GREEDY_BUDGET = 24_000
_SHAKE_BUDGET = 24_000
_SHAKEN = 2
# Steps that differ by no more than this, relatively, are equal: what rounding to ticks may make of one.
_ROUNDING = 1e-6

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


@dataclass(frozen=True)
class _Published:
    """What another family generates for the setting, within its cap."""

    lists: ActionLists
    candidate: _Candidate


def auto(setting: Setting) -> ActionLists:
    """The compute actions of each rank."""
    operations = Operations.of(setting, setting.memory_cap)
    published = list(_published(operations))
    found = _search(operations, [each.candidate for each in published])
    best = min(
        (join_backwards(operations, found), operations.actions(operations.orders(found.starts))),
        key=lambda lists: _predicted_step(setting, lists),
    )
    # The search knows how long messages take; the simulation also knows when they are posted, which can only
    # make a step longer. So a published schedule is looked at again only if it seems to be shorter.
    shortest = _predicted_step(setting, best)
    for each in published:
        if each.candidate.schedule.step * operations.unit < shortest * (1 - _ROUNDING):
            step = _predicted_step(setting, each.lists)
            if step < shortest:
                best, shortest = each.lists, step
    return best


def _published(operations: Operations) -> Iterator[_Published]:
    for family in _OTHERS:
        try:
            family.check(operations.setting)
        except IllegalSettingError:
            continue
        lists = family.generate(operations.setting)
        orders = operations.numbered(lists)
        if operations.fits(orders):
            schedule = timed(operations, orders, operations.durations)
            yield _Published(lists, _candidate(operations, schedule))


def _search(operations: Operations, published: Iterable[_Candidate]) -> Timed:
    """The shortest schedule found, of equally short ones that which holds least. Ends early at the bound."""
    goal = _goal(operations)
    candidates = sorted(published, key=lambda each: each.rank)

    def at_goal() -> bool:
        return bool(candidates) and candidates[0].schedule.step <= goal

    if not at_goal():
        for each in _more(operations, candidates[:]):
            candidates = sorted([*candidates, each], key=lambda each: each.rank)
            if at_goal():
                break
    for each in candidates[:_SHAKEN]:
        if not at_goal():
            shaken = shake(operations, each.schedule, _SHAKE_BUDGET, goal)
            candidates = sorted([*candidates, _candidate(operations, shaken)], key=lambda each: each.rank)
    return candidates[0].schedule


def _more(operations: Operations, published: Sequence[_Candidate]) -> Iterator[_Candidate]:
    """The published schedules closed up, and greedy ones, one after the other."""
    for each in published[: max(1, _CLOSING_BUDGET // operations.count)]:
        yield _candidate(operations, justify(operations, each.schedule, operations.durations))
    rules = _GREEDY_BUDGET // operations.count
    for schedule in greedy_schedules(operations, rules if published else max(1, rules)):
        yield _candidate(operations, schedule)


def _candidate(operations: Operations, schedule: Timed) -> _Candidate:
    return _Candidate(schedule, max(operations.peaks(operations.orders(schedule.starts))))


def _goal(operations: Operations) -> int:
    """The lower bound in ticks, a little more for what rounding to ticks may add."""
    setting = operations.setting
    bound = lower_bound(setting.placement, setting.costs, setting.microbatches, splits_backward=True)
    return round(bound / operations.unit * (1 + _ROUNDING))


def _predicted_step(setting: Setting, lists: ActionLists) -> float:
    return simulate(add_communication(lists, setting.placement), setting.placement, setting.costs).step


FAMILY = ScheduleFamily(
    name="Auto",
    generate=auto,
    placement="any",
    splits_backward=True,
    summary="the shortest step found under the memory limit, for the costs of each stage",
)
