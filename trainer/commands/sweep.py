"""Run a study: every run that its table [sweep] stands for, one after another, those that are missing or unfinished.

    stageline sweep study.toml
    stageline sweep study.toml --list
    stageline sweep study.toml --dry-run
    stageline sweep study.toml --index 3 --training.steps 500

Each run has its folder, outputs/<study>/<run>. All are checked before the first starts. --index runs one, as a task of
an array does. Keys on the command line hold for all runs. Exit code: 0, else that of the first run that failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from trainer.config.describe import literal
from trainer.config.load import config_to_toml
from trainer.config.processes import processes_needed
from trainer.config.rules import check_for_planning
from trainer.config.study import Study, StudyRun, read_study
from trainer.errors import ConfigurationError, ExitCode
from trainer.status import Standing, read_status
from trainer.stop import SIGNALS

_REPOSITORY = Path(__file__).resolve().parents[2]


def run(argv: list[str]) -> int:
    """Carry out `stageline sweep`. Raises ConfigurationError if the study, or any run of it, is wrong."""
    # Only the first word can be the file: later ones may be values of keys.
    file = argv[:1] if argv and not argv[0].startswith("-") else []
    options, rest = _parser().parse_known_args(argv[len(file) :])
    if file:
        rest = ["--config", *file, *rest]
    study = read_study(rest)
    if options.list:
        return _list(study)
    if options.index is not None:
        return run_one(
            study, options.index
        )  # of a task of an array, whose study was checked when it was submitted
    check_study(study)
    todo = [each for each in study.runs if not read_status(each.folder).done]
    print(f"{study.name}: {len(study.runs)} runs, {len(study.runs) - len(todo)} finished, {len(todo)} to do")
    if options.dry_run:
        for each in todo:
            print(" ".join(_command(each)))
        return ExitCode.DONE
    return _run_all(todo, study)


def check_study(study: Study) -> None:
    """Check every run and plan it, for the number of processes that it will have here.

    Raises ConfigurationError with what is wrong with any of them.
    """
    from trainer.plan.plan import make_plan

    reports = []
    for each in study.runs:
        asked = os.environ.get("NGPU", "")
        processes = int(asked) if asked.isdecimal() and int(asked) else processes_needed(each.loaded.config)
        try:
            check_for_planning(each.loaded, processes)
            make_plan(each.loaded.config, processes)
        except ConfigurationError as error:
            reports.append(f"{each.name}: {error}")
    if reports:
        raise ConfigurationError("\n".join(reports))


def run_one(study: Study, index: int) -> int:
    """Train one run, by its place in the study from 0, unless it is finished. Returns its exit code.

    Raises ConfigurationError if there is no such run.
    """
    if not 0 <= index < len(study.runs):
        raise ConfigurationError(f"--index {index}: {study.name} has the runs 0 to {len(study.runs) - 1}")
    each = study.runs[index]
    if read_status(each.folder).done:
        print(f"{each.name}: finished already")
        return ExitCode.DONE
    _write_configuration(each)
    return _run(_command(each))


def _run(command: Sequence[str]) -> int:
    """The exit code of a run. What this process is asked for, the run is: its launcher knows what it means."""
    process = subprocess.Popen(command, start_new_session=True)
    former = {
        number: signal.signal(number, lambda asked, _: process.send_signal(asked)) for number in SIGNALS
    }
    try:
        return process.wait()
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _run_all(todo: Sequence[StudyRun], study: Study) -> int:
    first = ExitCode.DONE
    for number, each in enumerate(todo, start=1):
        print(f"\n{study.name}, {number} of {len(todo)}: {each.name}", flush=True)
        code = run_one(study, study.runs.index(each))
        if code == ExitCode.STOPPED_ON_REQUEST or code < 0:
            print(f"{study.name}: stopped; the same command goes on from here")
            return ExitCode.STOPPED_ON_REQUEST
        if code != ExitCode.DONE:
            print(f"{each.name}: ended with exit code {code}")
            first = first or ExitCode(code)
    print(f"\n{study.name}: stageline report {study.folder} compares the runs")
    return first


def _configuration(each: StudyRun) -> Path:
    # Named after the run, and so are its curves at Weights & Biases.
    return each.folder / f"{each.name}.toml"


def _write_configuration(each: StudyRun) -> None:
    path = _configuration(each)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(config_to_toml(each.loaded.config), encoding="utf-8")


def _command(each: StudyRun) -> list[str]:
    return [str(_REPOSITORY / "run_train.sh"), "--config", str(_configuration(each))]


def _list(study: Study) -> int:
    for index, each in enumerate(study.runs):
        status = read_status(each.folder)
        standing = "to do" if status.standing is Standing.UNKNOWN else str(status.standing)
        values = " ".join(f"{key} = {literal(value)}" for key, value in each.values.items())
        print(f"{index:4}  {standing:9} {each.name}  {values}")
    return ExitCode.DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stageline sweep",
        usage="stageline sweep FILE [--list | --dry-run | --index N] [--table.key VALUE ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="show the runs and where each stands")
    what.add_argument("--dry-run", action="store_true", help="check everything and show what would be run")
    what.add_argument("--index", type=int, metavar="N", help="run the Nth alone, counted from 0")
    return parser
