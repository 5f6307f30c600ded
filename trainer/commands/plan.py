"""Print the plan of a run for any world size, compare two plans, or search for the best layout.

A plan, and the same as JSON:
    stageline plan --config llama_8b.toml --world-size 64 --accelerator H100
    stageline plan --config debug.toml --world-size 4 --experimental.pipeline_parallel_degree 4 --json

Two plans side by side:
    stageline plan --compare llama_8b.toml my_8b.toml --world-size 64 --accelerator H100

The best layouts for so many accelerators, best first:
    stageline plan --search --config llama_8b.toml --world-size 64 --accelerator H100

Needs no accelerator and no process group. Keys of the configuration can be set as for training.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.commands.arguments import Parser, positive
from trainer.config.load import Loaded, load
from trainer.config.processes import processes_needed
from trainer.config.rules import check_for_planning
from trainer.errors import ConfigurationError, ExitCode

if TYPE_CHECKING:
    from parallelisms.pipeline.setting import Costs
    from trainer.plan.accelerators import Accelerator
    from trainer.plan.view import PlanView


def run(argv: list[str]) -> int:
    """Carry out `stageline plan`. Raises ConfigurationError for everything that is wrong."""
    options, rest = _parser().parse_known_args(argv)
    if options.compare is not None:
        _compare(options, rest)
    elif options.search:
        _search(options, rest)
    else:
        _show(options, rest)
    return ExitCode.DONE


# One plan


def _show(options: argparse.Namespace, rest: Sequence[str]) -> None:
    view = _view(options, load(rest))
    if options.write_csv is not None:
        _write_csv(view, options.write_csv)
    if options.json:
        print(json.dumps(view.sections(), indent=1))
    else:
        _print_view(view, options)


def _view(options: argparse.Namespace, loaded: Loaded) -> PlanView:
    """The plan of a configuration with all its figures."""
    from trainer.plan.plan import make_plan
    from trainer.plan.view import view_plan

    world_size = _world_size(options, loaded)
    check_for_planning(loaded, world_size)
    costs = None if options.costs is None else _measured_costs(options.costs)
    plan = make_plan(loaded.config, world_size, costs=costs)
    return view_plan(plan, options.gpus_per_node, _accelerator(options), loaded.notices)


def _world_size(options: argparse.Namespace, loaded: Loaded) -> int:
    return processes_needed(loaded.config) if options.world_size is None else options.world_size


def _accelerator(options: argparse.Namespace) -> Accelerator | None:
    from trainer.plan.accelerators import find_accelerator

    return None if options.accelerator is None else find_accelerator(options.accelerator)


def _measured_costs(path: Path) -> Costs:
    """The costs of each stage as a run measured them."""
    from parallelisms.pipeline.costs import measured_costs
    from parallelisms.pipeline.timeline_file import TimelineFileError, read_timeline

    try:
        return measured_costs(read_timeline(path))
    except TimelineFileError as error:
        raise ConfigurationError(f"--costs: {error}") from error


def _write_csv(view: PlanView, path: Path) -> None:
    from parallelisms.pipeline.csv import write_csv
    from parallelisms.pipeline.errors import CsvError

    try:
        write_csv(view.plan.schedule.actions, path)
    except CsvError as error:
        raise ConfigurationError(f"--write-csv: {error}") from error


def _print_view(view: PlanView, options: argparse.Namespace) -> None:
    """As text; the picture in colours where the terminal has any."""
    from trainer.plan.render import action_lines, before_picture, picture_lines, picture_of

    for line in before_picture(view):
        print(line)
    if view.plan.layout.pipeline > 1:
        if sys.stdout.isatty():
            from rich.console import Console

            from parallelisms.pipeline.picture_text import print_picture

            print()
            print_picture(picture_of(view.plan), Console())
        else:
            width = max(120, shutil.get_terminal_size((120, 24)).columns)
            print("\n".join(picture_lines(view.plan, width)))
    if options.actions:
        print("\n".join(["", *action_lines(view.plan)]))


# Several plans


def _compare(options: argparse.Namespace, rest: Sequence[str]) -> None:
    from trainer.plan.compare import compare_plans, render_comparison

    if any(each == "--config" or each.startswith("--config=") for each in rest):
        raise ConfigurationError("--compare names both configurations; --config beside it would be a third")
    first, second = (load(["--config", name, *rest]) for name in options.compare)
    views = (_view(options, first), _view(options, second))
    comparison = compare_plans(_short_names(options.compare), (first.config, second.config), views)
    if options.json:
        print(json.dumps(comparison.data(), indent=1))
    else:
        print(render_comparison(comparison), end="")


def _short_names(paths: Sequence[str]) -> tuple[str, str]:
    first, second = (Path(path).stem for path in paths)
    return (first, second) if first != second else (paths[0], paths[1])


def _search(options: argparse.Namespace, rest: Sequence[str]) -> None:
    from trainer.plan.render_search import render_search
    from trainer.plan.search import search_layouts

    accelerator = _accelerator(options)
    if accelerator is None:
        raise ConfigurationError("--search needs --accelerator NAME, to know how fast it is and what fits")
    loaded = load(rest)
    found = search_layouts(
        loaded.config, _world_size(options, loaded), accelerator, options.gpus_per_node, options.top
    )
    if options.json:
        print(json.dumps(found.data(), indent=1))
    else:
        print(render_search(found), end="")


# The command line


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="stageline plan",
        usage="%(prog)s [options] [--config FILE] [--table.key value ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--world-size", type=positive, metavar="N", help="ranks of the job (default: what the degrees need)"
    )
    parser.add_argument(
        "--accelerator",
        metavar="NAME",
        help="hold the plan against the memory and the speed of H100, A100, ...",
    )
    parser.add_argument(
        "--gpus-per-node", type=positive, default=8, metavar="N", help="accelerators of a node (default: 8)"
    )
    parser.add_argument("--json", action="store_true", help="everything, for programs")
    parser.add_argument("--actions", action="store_true", help="print the exact actions of every rank too")
    parser.add_argument(
        "--write-csv", type=Path, metavar="FILE", help="write the schedule in torch's CSV format"
    )
    parser.add_argument(
        "--costs",
        type=Path,
        metavar="FILE",
        help="time the stages with what a run measured (its timeline/step-N.json)",
    )
    several = parser.add_argument_group("several plans")
    several.add_argument(
        "--compare", nargs=2, metavar=("A.toml", "B.toml"), help="set two plans side by side"
    )
    several.add_argument("--search", action="store_true", help="propose layouts, best first")
    several.add_argument(
        "--top", type=positive, default=5, metavar="N", help="how many layouts to propose (default: 5)"
    )
    return parser
