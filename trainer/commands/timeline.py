"""Draw the timeline of a pipeline schedule, or of a step that a run measured.

A schedule as it is planned:
    stageline timeline --schedule 1F1B --stages 4 --microbatches 8
    stageline timeline --schedule ZBVZeroBubble --stages 8 --microbatches 8 --costs 1,1.2,0.8 --svg zbv.svg

Several beside each other on the same ranks:
    stageline timeline --schedule 1F1B ZBVZeroBubble --ranks 4 --microbatches 8

What a run measured ([profiling] pipeline_timeline_steps), beside its plan, and where they differ:
    stageline timeline outputs/debug --step 10
"""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.commands.arguments import Parser, natural, positive
from trainer.errors import ConfigurationError, ExitCode

if TYPE_CHECKING:
    from parallelisms.pipeline.factory import PipelineSchedule
    from parallelisms.pipeline.measured import Timeline
    from parallelisms.pipeline.picture import Picture

_MOST_ACTIONS = 2_000_000  # of a schedule that is drawn: beyond, nobody would see anything


def run(argv: list[str]) -> int:
    """Carry out `stageline timeline`. Raises ConfigurationError for wrong arguments, folders and files."""
    arguments = _parser().parse_args(argv)
    planned = arguments.schedule is not None
    if planned == (arguments.run_folder is not None):
        raise ConfigurationError(
            "stageline timeline needs either a run folder, or --schedule with --stages and --microbatches"
        )
    if planned:
        _draw_plan(arguments)
    else:
        _draw_run(arguments)
    return ExitCode.DONE


# A planned schedule


def _draw_plan(arguments: argparse.Namespace) -> None:
    from parallelisms.pipeline.picture_build import picture_of_plan, picture_of_plans

    if arguments.step is not None or arguments.pipeline is not None:
        raise ConfigurationError("--step and --pipeline choose from a run folder; --schedule draws a plan")
    schedules = tuple(_build(name, arguments) for name in arguments.schedule)
    if len(schedules) == 1:
        picture = picture_of_plan(schedules[0])
    else:
        picture = picture_of_plans(schedules, " and ".join(each.name for each in schedules))
    _show(picture, arguments)


def _build(name: str, arguments: argparse.Namespace) -> PipelineSchedule:
    """The schedule that the options describe."""
    from parallelisms.pipeline.errors import ScheduleError
    from parallelisms.pipeline.factory import build_schedule
    from parallelisms.pipeline.schedules.catalogue import find
    from parallelisms.pipeline.setting import Costs, Setting

    microbatches = arguments.microbatches
    if microbatches is None:
        raise ConfigurationError(f"--schedule {name} needs --microbatches, 1 or more")
    try:
        family = find(name)
        shape = _shape(arguments, family.default_stages_per_rank, family.name)
        if 3 * shape.stages * microbatches > _MOST_ACTIONS:
            raise ConfigurationError(
                f"{shape.stages} stages x {microbatches} microbatches are too many to draw; "
                f"at most {_MOST_ACTIONS // 3} in all"
            )
        placement = family.place(shape.ranks, shape.each)
        # A rank's whole share is what the costs are for, so that schedules can be compared.
        forward, inputs, weights = (cost / shape.each for cost in arguments.costs)
        costs = Costs.equal(shape.stages, forward, inputs, weights, arguments.transfer)
        return build_schedule(name, Setting(placement, microbatches, costs, arguments.memory_limit))
    except ScheduleError as error:
        raise ConfigurationError(str(error)) from error


@dataclass(frozen=True)
class _Shape:
    """Ranks with `each` stages."""

    ranks: int
    each: int

    @property
    def stages(self) -> int:
        return self.ranks * self.each


def _shape(arguments: argparse.Namespace, default: int, name: str) -> _Shape:
    """From two of --stages, --ranks and --stages-per-rank, or one of the first two and the schedule's default."""
    stages, ranks, each = arguments.stages, arguments.ranks, arguments.stages_per_rank
    if stages is None and ranks is None:
        raise ConfigurationError(f"--schedule {name} needs --stages, or --ranks, 1 or more")
    if stages is None:
        return _Shape(ranks, each or default)
    if ranks is not None:
        if stages != ranks * (each or max(stages // ranks, 1)):
            per_rank = "" if each is None else f" x --stages-per-rank {each}"
            raise ConfigurationError(
                f"--stages {stages} cannot be shared equally by --ranks {ranks}{per_rank}"
            )
        return _Shape(ranks, stages // ranks)
    if stages % (each or default):
        raise ConfigurationError(
            f"{name} has {each or default} stages on each rank; --stages {stages} is not a multiple of that"
        )
    return _Shape(stages // (each or default), each or default)


# A measured step


def _draw_run(arguments: argparse.Namespace) -> None:
    from parallelisms.pipeline.picture_build import picture_of_timeline
    from parallelisms.pipeline.timeline_file import TimelineFileError, read_timeline
    from trainer.commands.timeline_report import report_lines

    path = _timeline_file(Path(arguments.run_folder), arguments.step)
    try:
        timeline: Timeline = read_timeline(path)
        replica = timeline.replicas[0] if arguments.pipeline is None else arguments.pipeline
        picture = picture_of_timeline(timeline, replica)
    except TimelineFileError as error:
        raise ConfigurationError(str(error)) from error
    except ValueError as error:
        raise ConfigurationError(f"--pipeline: {error}") from error
    _show(picture, arguments)
    print()
    for line in report_lines(timeline, replica):
        print(line)


def _timeline_file(run_folder: Path, step: int | None) -> Path:
    """The file of a step, or of the latest one."""
    if run_folder.is_file():
        return run_folder
    steps = {
        int(match[1]): path
        for path in (run_folder / "timeline").glob("step-*.json")
        if (match := re.fullmatch(r"step-(\d+)\.json", path.name))
    }
    if not steps:
        raise ConfigurationError(
            f"{run_folder} has no measured timeline; train with --profiling.pipeline_timeline_steps '[10]'"
        )
    if step is None:
        return steps[max(steps)]
    if step not in steps:
        raise ConfigurationError(
            f"{run_folder} has no timeline of step {step}; there are those of {_listed(sorted(steps))}"
        )
    return steps[step]


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:20]))
    return shown if len(numbers) <= 20 else f"{shown}, ..."


# Both


def _show(picture: Picture, arguments: argparse.Namespace) -> None:
    from rich.console import Console

    from parallelisms.pipeline.picture_svg import draw_svg
    from parallelisms.pipeline.picture_text import print_picture

    if arguments.svg is not None:
        try:
            Path(arguments.svg).write_text(draw_svg(picture), encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(f"--svg {arguments.svg} cannot be written: {error.strerror}") from error
    console = Console(width=arguments.width, no_color=True if arguments.no_color else None)
    if arguments.width is None and not console.is_terminal:
        # What is read later has no terminal's width; the usual 80 columns would be too few.
        console = Console(width=max(120, shutil.get_terminal_size((120, 24)).columns))
    print_picture(picture, console)
    if arguments.svg is not None:
        print(f"\nwrote {arguments.svg}")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="stageline timeline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "run_folder", nargs="?", metavar="RUN_FOLDER", help="of a run that measured timelines"
    )
    parser.add_argument("--svg", metavar="FILE", help="also draw it as SVG")
    parser.add_argument(
        "--width", type=positive, metavar="N", help="characters of a line (default: the terminal's)"
    )
    parser.add_argument(
        "--no-color", action="store_true", help="letters and lines only; NO_COLOR does the same"
    )
    measured = parser.add_argument_group("of a run")
    measured.add_argument(
        "--step", type=positive, metavar="N", help="which step (default: the latest measured)"
    )
    measured.add_argument(
        "--pipeline",
        type=natural,
        metavar="K",
        help="which of several data-parallel pipelines (default: the first)",
    )
    plan = parser.add_argument_group("of a plan")
    plan.add_argument(
        "--schedule", nargs="+", metavar="NAME", help="e.g. GPipe, 1F1B, Interleaved1F1B, ZBVZeroBubble"
    )
    plan.add_argument("--stages", type=positive, metavar="S", help="stages of the whole pipeline")
    plan.add_argument("--microbatches", type=positive, metavar="M", help="any number of 1 or more")
    plan.add_argument(
        "--ranks",
        type=positive,
        metavar="R",
        help="default: stages divided by the schedule's stages per rank",
    )
    plan.add_argument("--stages-per-rank", type=positive, metavar="V", help="instead of --ranks")
    plan.add_argument(
        "--costs",
        type=_costs,
        default=(1.0, 1.0, 1.0),
        metavar="F,I,W",
        help="time of the forward, of the gradient of the inputs and of the weights, of one microbatch on a "
        "rank's whole share (default: 1,1,1)",
    )
    plan.add_argument(
        "--transfer", type=_time, default=0.0, metavar="T", help="time of one message (default: 0)"
    )
    plan.add_argument(
        "--memory-limit",
        type=_time,
        metavar="N",
        help="activations that a rank may hold, in microbatches of its whole share",
    )
    return parser


def _time(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return value


def _costs(text: str) -> tuple[float, float, float]:
    parts = text.split(",")
    try:
        forward, inputs, weights = (_time(part) for part in parts)
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(f"{text!r} is not three numbers F,I,W, such as 1,1.2,0.8") from None
    if forward + inputs + weights <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: one of the three must be more than 0")
    return forward, inputs, weights
