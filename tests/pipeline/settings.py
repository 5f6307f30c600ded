"""Settings for property tests: every schedule, p <= 8, v <= 4, m <= 24, even and uneven costs."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from parallelisms.pipeline.actions import Action, ActionLists, Kind
from parallelisms.pipeline.schedules.catalogue import FAMILIES, ScheduleFamily
from parallelisms.pipeline.setting import Costs, Placement, Setting


@dataclass(frozen=True)
class Case:
    """A schedule and a setting that is legal for it."""

    family: ScheduleFamily
    setting: Setting


def shared_equally(placement: Placement, f: float = 1.0, b: float = 1.0, w: float = 1.0) -> Costs:
    """Costs of equal stages: f, b, w are those of one rank's whole share of a microbatch."""
    each = placement.stages // placement.ranks
    return Costs.equal(placement.stages, f / each, b / each, w / each)


def family_named(name: str) -> ScheduleFamily:
    return next(family for family in FAMILIES if family.name == name)


def stage_counts(family: ScheduleFamily) -> tuple[int, ...]:
    """The stages per rank that a schedule allows, up to 4."""
    if family.single_stage:
        return (1,)
    return (2,) if family.placement == "v" else (1, 2, 3, 4)


@st.composite
def costs(draw: st.DrawFn, stages: int) -> Costs:
    times = st.lists(st.floats(0.1, 5.0), min_size=stages, max_size=stages).map(tuple)
    return Costs(draw(times), draw(times), draw(times), transfer=draw(st.sampled_from((0.0, 0.3))))


@st.composite
def cases(draw: st.DrawFn, max_ranks: int = 8, max_microbatches: int = 24, max_stages: int = 4) -> Case:
    family = draw(st.sampled_from(FAMILIES))
    counts = [count for count in stage_counts(family) if count <= max_stages] or [stage_counts(family)[0]]
    placement = family.place(draw(st.integers(1, max_ranks)), draw(st.sampled_from(counts)))
    microbatches = draw(st.integers(1, max_microbatches))
    even = draw(st.booleans())
    chosen = shared_equally(placement) if even else draw(costs(placement.stages))
    return Case(family, Setting(placement, microbatches, chosen))


@dataclass(frozen=True)
class ValidLists:
    """Compute actions that are a correct step, on any placement, with backwards in one go or in two."""

    placement: Placement
    microbatches: int
    lists: ActionLists


@st.composite
def valid_lists(draw: st.DrawFn, max_stages: int = 6, max_microbatches: int = 4) -> ValidLists:
    """A random placement and a random order of its actions: any that a greedy run with random choices gives."""
    ranks = draw(st.integers(1, 4))
    # Every rank has a stage, the rest sit anywhere: V shapes, loops and stranger ones.
    extra = draw(st.lists(st.integers(0, ranks - 1), max_size=max_stages - ranks))
    owners = tuple(draw(st.permutations([*range(ranks), *extra])))
    stages, microbatches = len(owners), draw(st.integers(1, max_microbatches))
    splits = draw(st.lists(st.booleans(), min_size=stages * microbatches, max_size=stages * microbatches))

    def backward(stage: int, microbatch: int) -> Action:
        kind = Kind.BACKWARD_INPUT if splits[stage * microbatches + microbatch] else Kind.BACKWARD
        return Action(stage, kind, microbatch)

    lists: list[list[Action]] = [[] for _ in range(ranks)]
    ready = [Action(0, Kind.FORWARD, microbatch) for microbatch in range(microbatches)]
    while ready:
        action = ready.pop(draw(st.integers(0, len(ready) - 1)))
        lists[owners[action.stage]].append(action)
        stage, microbatch = action.stage, action.microbatch
        assert microbatch is not None

        if action.kind is Kind.FORWARD:
            last = stage == stages - 1
            ready.append(backward(stage, microbatch) if last else Action(stage + 1, Kind.FORWARD, microbatch))
        elif action.kind is not Kind.BACKWARD_WEIGHT:
            if action.kind is Kind.BACKWARD_INPUT:
                ready.append(Action(stage, Kind.BACKWARD_WEIGHT, microbatch))
            if stage > 0:
                ready.append(backward(stage - 1, microbatch))
    return ValidLists(Placement(owners), microbatches, tuple(map(tuple, lists)))
