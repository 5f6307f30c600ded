"""Check configurations: everything that is wrong with them, without starting anything.

    stageline check train_configs/*.toml
    stageline check my.toml --world-size 64

Prints "FILE: ok" or a line for each problem. Exit code 0 if all are right, else 2. Rules that depend on the number
of processes are checked if --world-size is given.
"""

from __future__ import annotations

import argparse
import sys

from trainer.config.load import load
from trainer.config.report import raise_for
from trainer.config.rules import check, check_files
from trainer.errors import ConfigurationError, ExitCode


def run(argv: list[str]) -> int:
    """Check every file that is named and return the exit code."""
    arguments = _parser().parse_args(argv)
    wrong = 0
    for file in arguments.files:
        try:
            for notice in _check(file, arguments.world_size):
                print(f"{file}: note: {notice}")
        except ConfigurationError as error:
            print(error)
            wrong += 1
        else:
            print(f"{file}: ok")
        sys.stdout.flush()
    return ExitCode.WRONG_CONFIGURATION if wrong else ExitCode.DONE


def _check(file: str, world_size: int | None) -> tuple[str, ...]:
    """The notices about a file that is right. Raises ConfigurationError with the report about one that is not."""
    loaded = load(["--config", file])
    problems = check(loaded.config, world_size) + check_files(loaded.config)
    raise_for(problems, loaded.given, loaded.shown_path)
    return loaded.notices


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stageline check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="a path, or a name in train_configs/")
    parser.add_argument("--world-size", type=_positive, metavar="N", help="number of processes of the job")
    return parser


def _positive(text: str) -> int:
    if not (text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes")
    return int(text)
