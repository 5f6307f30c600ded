"""Print the plan of a run for any world size, on any machine.

    stageline plan --config llama_8b.toml --world-size 64
    stageline plan --config debug.toml --world-size 4 --experimental.pipeline_parallel_degree 4 --json

Needs no accelerator and no process group. Keys of the configuration can be set as for training.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from parallelisms.pipeline.csv import write_csv
from trainer.config.load import load
from trainer.config.processes import processes_needed
from trainer.config.rules import check_for_planning
from trainer.plan.plan import make_plan
from trainer.plan.render import render


def run(argv: list[str]) -> int:
    """Print the plan, as text or as JSON."""
    parser = argparse.ArgumentParser(
        prog="stageline plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world-size", type=int, help="ranks of the job; default: what the degrees need")
    parser.add_argument("--json", action="store_true", help="print what a run writes to plan.json")
    parser.add_argument(
        "--write-csv", type=Path, metavar="FILE", help="write the schedule in torch's CSV format"
    )
    options, rest = parser.parse_known_args(argv)
    loaded = load(rest)
    world_size = processes_needed(loaded.config) if options.world_size is None else options.world_size
    check_for_planning(loaded, world_size)
    plan = make_plan(loaded.config, world_size)
    if options.write_csv is not None:
        write_csv(plan.schedule.actions, options.write_csv)
    print(json.dumps(plan.sections(), indent=1) if options.json else render(plan), end="", file=sys.stdout)
    return 0
