"""Writes docs/schedules.md: every schedule drawn, and by how much Auto is shorter than the best of the others.

    python benchmarks/schedules_table.py > docs/schedules.md          all of it, about ten minutes
    python benchmarks/schedules_table.py --ranks 4                    only the tables for 4 ranks

All of it is planned, none of it measured: `benchmarks/sleeping_stages.py` shows that the executor keeps to the
plan. Nothing but the search times depends on the machine.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import mean

from parallelisms.pipeline.errors import ScheduleError
from parallelisms.pipeline.factory import PipelineSchedule, build_schedule
from parallelisms.pipeline.schedules.catalogue import FAMILIES, find
from parallelisms.pipeline.schedules.family import ScheduleFamily
from parallelisms.pipeline.setting import Costs, Placement, Setting

AUTO = find("Auto")
OTHERS = tuple(family for family in FAMILIES if family is not AUTO)


@dataclass(frozen=True)
class Kind:
    """A way to cut a model: f, b, w of each of the 2p half shares of its layers, from (index, 2p)."""

    name: str
    explanation: str
    half: Callable[[int, int], tuple[float, float, float]]

    def costs(self, placement: Placement) -> Costs:
        ranks = placement.ranks
        halves = [self.half(index, 2 * ranks) for index in range(2 * ranks)]
        if placement.stages == ranks:  # a stage is two neighbouring halves
            halves = [
                (f + ff, b + bb, w + ww)
                for (f, b, w), (ff, bb, ww) in zip(halves[::2], halves[1::2], strict=True)
            ]
        forward, backward_input, backward_weight = zip(*halves, strict=True)
        return Costs(forward, backward_input, backward_weight)


def _layers(index: int, count: int) -> tuple[float, float, float]:
    layers = (5 if index % 3 == 0 else 4) / 8
    head = 0.25 if index == count - 1 else 0.0
    return layers + head, 1.2 * layers + head, 0.8 * layers + head


def _scattered(index: int, count: int) -> tuple[float, float, float]:
    chance = random.Random(index)
    return chance.uniform(0.35, 0.65), chance.uniform(0.35, 0.65), chance.uniform(0.35, 0.65)


EVEN = Kind(
    "Even stages",
    "f = b = w = 1 for a rank's share of one microbatch, 1/2 for each of two stages.",
    lambda index, count: (0.5, 0.5, 0.5),
)
UNEVEN = Kind(
    "Uneven layers",
    "Halves of a rank's share have 5, 4, 4, 5, 4, 4, ... layers of f = 1/8, b = 1.2/8, w = 0.8/8, and the last "
    "one has an output layer as long as two layers.",
    _layers,
)
SCATTERED = Kind(
    "Scattered costs",
    "f, b and w of each half of a rank's share are anything between 0.35 and 0.65.",
    _scattered,
)


@dataclass(frozen=True)
class Column:
    """One placement of the tables."""

    name: str
    single_stage: bool
    v_shaped: bool

    def place(self, ranks: int) -> Placement:
        return (
            Placement.v_shaped(ranks)
            if self.v_shaped
            else Placement.looped(ranks, 1 if self.single_stage else 2)
        )


COLUMNS = (
    Column("1 stage", True, False),
    Column("2 stages, looped", False, False),
    Column("2 stages, V", False, True),
)


@dataclass(frozen=True)
class Comparison:
    """Auto against the best of the others in one setting; `other` is None where none fits into the cap."""

    auto: PipelineSchedule
    other: PipelineSchedule | None
    seconds: float

    @property
    def gain(self) -> float:
        """The part of the other's step that Auto saves."""
        return 0.0 if self.other is None else 1 - self.auto.prediction.step / self.other.prediction.step

    @property
    def at_bound(self) -> bool:
        return self.auto.prediction.step <= self.auto.prediction.bound * (1 + 1e-6)


def compare(setting: Setting) -> Comparison:
    start = time.process_time()
    auto = build_schedule(AUTO.name, setting)
    seconds = time.process_time() - start
    return Comparison(auto, best_other(setting), seconds)


def best_other(setting: Setting) -> PipelineSchedule | None:
    """The shortest of the other schedules that exist for the placement and fit into the cap."""
    schedules = []
    for family in OTHERS:
        try:
            schedules.append(build_schedule(family.name, setting))
        except ScheduleError:
            continue
    return min(schedules, key=lambda schedule: schedule.prediction.step, default=None)


def microbatch_counts(ranks: int) -> list[int]:
    return sorted({1, 2, ranks // 2, ranks, 2 * ranks, 4 * ranks})


def families() -> Iterator[str]:
    yield "## The schedules at p = 4, m = 8\n"
    yield (
        "f = b = w = 1 for a rank's share of one microbatch, no transfer time. A rank's work is 24. `F0` forward, "
        "`B0` whole backward, `I0` and `W0` its two parts, of microbatch 0; lower case is the rank's second stage. "
        "*Step* is the wall clock; *bubble of a rank* is the longest idle time of a rank between its first start "
        "and its last end (the zero bubble of papers); *bubble of the step* is the idle share of the wall clock; "
        "*held* is the most microbatches whose activations a rank holds.\n"
    )
    schedules = [(family, _draw_setting(family)) for family in FAMILIES]
    yield "| schedule | stages | step | bubble of a rank | bubble of the step | held | |\n|---|---|---|---|---|---|---|"
    for family, schedule in schedules:
        yield _family_row(family, schedule)
    for family, schedule in schedules:
        yield f"\n### {family.name}\n\n```\n{picture(schedule)}\n```"
    capped = build_schedule("Auto", Setting(Placement.v_shaped(4), 8, EVEN.costs(Placement.v_shaped(4)), 2.0))
    yield f"\n### Auto with at most 2 microbatches held\n\n```\n{picture(capped)}\n```"


def _draw_setting(family: ScheduleFamily) -> PipelineSchedule:
    placement = family.place(4)
    return build_schedule(family.name, Setting(placement, 8, EVEN.costs(placement)))


def _family_row(family: ScheduleFamily, schedule: PipelineSchedule) -> str:
    prediction = schedule.prediction
    idle = max(
        spans[-1].end - spans[0].start - sum(span.end - span.start for span in spans)
        for spans in prediction.spans
    )
    stages = "V, 2" if schedule.placement == Placement.v_shaped(4) else str(schedule.placement.stages // 4)
    held = max(schedule.proof.peak_share)
    return (
        f"| {family.name} | {stages} | {prediction.step:g} | {idle:g} | {prediction.step_bubble:.1%} | {held:g} "
        f"| {family.summary} |"
    )


def picture(schedule: PipelineSchedule) -> str:
    """A line for each rank, two characters for each unit of time (for the half of one, with two stages)."""
    each = schedule.placement.stages // schedule.placement.ranks
    lines = []
    for rank, spans in enumerate(schedule.prediction.spans):
        second = schedule.placement.stages_of(rank)[-1] if each > 1 else None
        line = ""
        for span in spans:
            letter = span.action.kind.value
            label = f"{letter.lower() if span.action.stage == second else letter}{span.action.microbatch}"
            line = line.ljust(round(2 * each * span.start))
            line += label.ljust(round(2 * each * (span.end - span.start)), "~")
        lines.append(f"rank {rank} |{line.rstrip()}")
    return "\n".join(lines)


def tables(ranks: list[int]) -> Iterator[str]:
    yield (
        "\n## Auto against the best of the others\n\n"
        "By how much Auto's step is shorter than that of the best other schedule for the same placement and under "
        "the same memory cap, and which that is. **Bold**: Auto is at the lower bound, no schedule could be "
        "shorter. Where no other schedule fits into the cap, Auto's step over that bound is given, which no "
        "schedule within the cap need be able to reach. The last column is Auto on the best of the three placements "
        "against 1F1B, which has one stage per rank and always takes the memory of 1F1B.\n\n"
        "For equal stages the published schedules leave nothing to gain: the gain there is in having the right "
        "one for every m and every cap. Where all orders can be tried (2 and 3 ranks, 2 and 3 microbatches) Auto "
        "is the shortest of all; a test holds that."
    )
    seconds: list[float] = []
    for kind in (EVEN, UNEVEN, SCATTERED):
        for half in (False, True):
            cap = "p // 2 + 1 microbatches, what V-Half holds" if half else "p microbatches, what 1F1B holds"
            yield f"\n### {kind.name}, cap of {cap}\n\n{kind.explanation}\n"
            yield (
                "| p | m | "
                + " | ".join(column.name for column in COLUMNS)
                + " | against 1F1B |\n|---|---|---|---|---|---|"
            )
            gains: list[float] = []
            for p in ranks:
                for m in microbatch_counts(p):
                    comparisons = [_compare_in(column, kind, p, m, half) for column in COLUMNS]
                    seconds += [each.seconds for each in comparisons]
                    gains += [each.gain for each in comparisons if each.other is not None]
                    cells = [*map(_cell, comparisons), _against_1f1b(kind, p, m, comparisons)]
                    yield f"| {p} | {m} | " + " | ".join(cells) + " |"
                    print(f"{kind.name}, p {p}, m {m}", file=sys.stderr)
            yield f"\nOn average {mean(gains):.1%} shorter, at most {max(gains):.1%}, never longer."
    yield (
        f"\nThe search took {mean(seconds):.1f} s on average and {max(seconds):.1f} s at most on the machine that "
        "wrote this page (one core)."
    )


def _compare_in(column: Column, kind: Kind, ranks: int, microbatches: int, half: bool) -> Comparison:
    placement = column.place(ranks)
    cap = ranks // 2 + 1 if half else ranks
    return compare(Setting(placement, microbatches, kind.costs(placement), float(cap)))


def _cell(comparison: Comparison) -> str:
    if comparison.other is None:
        ratio = comparison.auto.prediction.step / comparison.auto.prediction.bound
        return "**only Auto**" if comparison.at_bound else f"only Auto, {ratio:.2f}"
    assert comparison.gain > -1e-9
    gain = f"{abs(comparison.gain):.1%}"
    return f"{f'**{gain}**' if comparison.at_bound else gain} {comparison.other.name}"


def _against_1f1b(kind: Kind, ranks: int, microbatches: int, comparisons: list[Comparison]) -> str:
    placement = Placement.looped(ranks, 1)
    plain = build_schedule("1F1B", Setting(placement, microbatches, kind.costs(placement))).prediction.step
    best = min(each.auto.prediction.step for each in comparisons)
    return f"{1 - best / plain:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="*", help="only the tables, for these numbers of ranks")
    options = parser.parse_args()
    if options.ranks is None:
        print("# Schedules: pictures and results\n")
        print(
            "Written by `benchmarks/schedules_table.py`; every number is planned and proven, none measured.\n"
        )
        for line in families():
            print(line)
    for line in tables(options.ranks or [4, 8, 16]):
        print(line, flush=True)


if __name__ == "__main__":
    main()
