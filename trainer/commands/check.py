"""Check configurations: everything that is wrong with them, without starting anything.

    stageline check train_configs/*.toml
    stageline check my.toml --world-size 64
    stageline check torchtitan.toml --write today.toml

Prints "FILE: ok" or a line for each problem. Exit code 0 if all are right, else 2. Rules that depend on the number
of processes are checked if --world-size is given. Old spellings are noted with today's; --write makes a file of today's
keys that means the same, without comments, and with everything that the file builds on.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from trainer.commands.arguments import positive
from trainer.config.load import Loaded, given_to_toml, load
from trainer.config.report import raise_for
from trainer.config.rules import check, check_files
from trainer.errors import ConfigurationError, ExitCode


def run(argv: list[str]) -> int:
    """Check every file that is named and return the exit code."""
    arguments = _parser().parse_args(argv)
    if arguments.write is not None and len(arguments.files) != 1:
        raise ConfigurationError("stageline check: --write takes one file")
    wrong = 0
    for file in arguments.files:
        try:
            loaded = _check(file, arguments.world_size)
            for notice in loaded.notices:
                print(f"{file}: note: {notice}")
            if arguments.write is not None:
                _write(loaded, arguments.write)
        except ConfigurationError as error:
            print(error)
            wrong += 1
        else:
            print(f"{file}: ok")
        sys.stdout.flush()
    return ExitCode.WRONG_CONFIGURATION if wrong else ExitCode.DONE


def _check(file: str, world_size: int | None) -> Loaded:
    """A file that is right. Raises ConfigurationError with the report about one that is not."""
    loaded = load(["--config", file])
    problems = check(loaded.config, world_size) + check_files(loaded.config)
    raise_for(problems, loaded.given, loaded.shown_path)
    return loaded


def _write(loaded: Loaded, path: Path) -> None:
    """The given values by today's keys. Raises ConfigurationError rather than writing over a file."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(given_to_toml(loaded))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from error
    print(f"wrote {path}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stageline check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="a path, or a name in train_configs/")
    parser.add_argument("--write", type=Path, metavar="NEW", help="write one file in today's spelling")
    parser.add_argument("--world-size", type=positive, metavar="N", help="number of processes of the job")
    return parser
