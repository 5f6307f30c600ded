"""Check the plan for a number of nodes, write a SLURM batch script, and submit it.

    stageline submit --config llama_8b.toml --nodes 4 --gpus-per-node 8 --time 2:00:00
    stageline submit --config debug.toml --nodes 2 --processes-per-node 2 --dry-run
    stageline submit --config my.toml --nodes 4 --gpus-per-node 8 --partition batch --sbatch=--account=lab
    stageline submit --config study.toml --array --gpus-per-node 8
    stageline submit --config study.toml --array 0-7%2 --gpus-per-node 8

The job goes on through time limits, preemption and failures until the run is done. Keys of the configuration can be
set as for training. --array makes a job of each run of a study, or of those that are numbered. --dry-run shows the
batch script and submits nothing.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.cluster.batch_script import ROOT, TEMPLATE, batch_script, options_of, read_template
from trainer.commands.arguments import Parser, positive
from trainer.config.load import Loaded, load
from trainer.config.processes import degrees_product
from trainer.config.report import raise_for
from trainer.config.rules import check_files, check_for_planning
from trainer.config.study import read_study
from trainer.errors import ConfigurationError, ExitCode

_ALL = "all"
_TIME = re.compile(r"(\d+-)?\d+(:\d\d){0,2}|UNLIMITED", re.IGNORECASE)


def run(argv: list[str]) -> int:
    """Carry out `stageline submit`. Raises ConfigurationError for everything that is wrong."""
    options, arguments = _parser().parse_known_args(argv)
    template = read_template(options.template)
    work = _study(options, arguments) if options.array else _single(arguments)
    processes = _processes(options, template, work.runs[0])
    _check(work.runs, processes * options.nodes)
    sbatch = _sbatch_options(options, processes, work)
    script = batch_script(template, sbatch, work.command)
    if options.dry_run:
        print(f"\n{script}", end="")
        return ExitCode.DONE
    path = work.folder / "job.sbatch"
    work.folder.mkdir(parents=True, exist_ok=True)
    path.write_text(script, encoding="utf-8")
    job = _submit(path)
    log = sbatch["output"].replace("%A", job).replace("%j", job).replace("%a", "*")
    print(f"{'submitted':12}job {job}: {path}")
    print(f"{'follow':12}squeue --job {job}; tail -F {log}")
    print(
        f"{'end':12}scancel {job}    (only save, and go on in a new place in the queue: scancel --signal=USR1 {job})"
    )
    return ExitCode.DONE


@dataclass(frozen=True)
class _Work:
    """What the job does: `command`, as the shell reads it, for one run or for each of several."""

    name: str
    folder: Path
    runs: tuple[Loaded, ...]
    command: str


def _single(arguments: list[str]) -> _Work:
    loaded = load(arguments)
    command = shlex.join([str(ROOT / "run_train.sh"), *arguments])
    return _Work(loaded.name, loaded.dump_folder, (loaded,), command)


def _study(options: argparse.Namespace, arguments: list[str]) -> _Work:
    """A task of the array runs one run of the study. Sets `options.array` to all runs if none are named."""
    study = read_study(arguments)
    last = len(study.runs) - 1
    if options.array == _ALL:
        options.array = f"0-{last}"
    numbers = [
        int(number) for number in re.findall(r"\d+", options.array.partition("%")[0].partition(":")[0])
    ]
    if not numbers or max(numbers) > last:
        raise ConfigurationError(f"--array {options.array}: {study.name} has the runs 0 to {last}")
    sweep = shlex.join([sys.executable, "-m", "trainer.commands.main", "sweep", *arguments])
    command = f'PYTHONPATH={shlex.quote(str(ROOT))} {sweep} --index "$SLURM_ARRAY_TASK_ID"'
    return _Work(study.name, study.folder, tuple(each.loaded for each in study.runs), command)


def _check(runs: Sequence[Loaded], world_size: int) -> None:
    """The same rules as in the job, and the plan of each run; the first one's outline is printed. Data and weights
    must be there now."""
    from trainer.plan.plan import make_plan
    from trainer.plan.render import summary

    plans = []
    for loaded in runs:
        check_for_planning(loaded, world_size)
        raise_for(check_files(loaded.config), loaded.given, loaded.shown_path)
        plans.append(make_plan(loaded.config, world_size))
    for subject, text in [*(("note", each) for each in runs[0].notices), *summary(plans[0])]:
        print(f"{subject:12}{text}")


def _processes(options: argparse.Namespace, template: str, loaded: Loaded) -> int:
    """Ranks of each node: as asked for, as the template has it, one for each of the GPUs that the nodes of the
    partition have, or what the configured degrees need. Sets `options.gpus_per_node` to what SLURM says."""
    if options.processes_per_node or options.gpus_per_node:
        return options.processes_per_node or options.gpus_per_node
    there = options_of(template)
    for name in ("gpus-per-node", "ntasks-per-node"):
        number = there.get(name, "").rpartition(":")[2]
        if number.isdecimal():
            return int(number)
    options.gpus_per_node = _gpus_of_nodes(options.partition)
    return options.gpus_per_node or -(-degrees_product(loaded.config) // options.nodes)


def _gpus_of_nodes(partition: str | None) -> int | None:
    """The fewest that a node of the partition has; None if it has none, or SLURM cannot be asked."""
    command = ["sinfo", "--noheader", "--format=%G", *([f"--partition={partition}"] if partition else [])]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return min((int(number) for number in re.findall(r"gpu(?::[^:,()]+)?:(\d+)", said)), default=None)


def _sbatch_options(options: argparse.Namespace, processes: int, work: _Work) -> dict[str, str]:
    chosen = {
        "job-name": work.name,
        "nodes": str(options.nodes),
        "ntasks-per-node": str(processes),
        "output": str(work.folder / ("slurm-%A_%a.out" if options.array else "slurm-%j.out")),
    }
    if options.gpus_per_node:
        chosen["gpus-per-node"] = str(options.gpus_per_node)
    for key in ("time", "partition", "array"):
        if getattr(options, key) is not None:
            chosen[key] = getattr(options, key)
    for more in options.sbatch:
        key, _, value = more.removeprefix("--").partition("=")
        chosen[key] = value
    return chosen


def _submit(path: Path) -> str:
    try:
        done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True, timeout=60)
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"there is no sbatch here; {path} is written, to be submitted where there is"
        ) from error
    if done.returncode:
        raise ConfigurationError(f"{path}: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="stageline submit",
        usage="%(prog)s [options] [--config FILE] [--table.key value ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--nodes", type=positive, default=1, metavar="N", help="nodes of the job (default: 1)"
    )
    parser.add_argument(
        "--gpus-per-node", type=positive, metavar="N", help="accelerators of a node, with a process for each"
    )
    parser.add_argument(
        "--processes-per-node",
        type=positive,
        metavar="N",
        help="processes of a node, where there are no accelerators",
    )
    parser.add_argument("--time", type=_time, metavar="H:MM:SS", help="limit after which the job is requeued")
    parser.add_argument("--partition", metavar="NAME")
    parser.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="any other option, e.g. --sbatch=--qos=high",
    )
    parser.add_argument(
        "--template",
        type=Path,
        default=TEMPLATE,
        metavar="FILE",
        help="a batch script (default: slurm/train.sbatch)",
    )
    parser.add_argument(
        "--array", nargs="?", const=_ALL, metavar="RUNS", help="runs of a study, e.g. 0-7%%2 (default: all)"
    )
    parser.add_argument("--dry-run", action="store_true", help="show the batch script; submit nothing")
    return parser


def _time(text: str) -> str:
    if not _TIME.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time as SLURM writes it, e.g. 2:00:00 or 1-12:00:00"
        )
    return text
