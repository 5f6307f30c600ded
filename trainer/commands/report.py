"""Make one self-contained HTML page about one run or several.

One run, into its folder as report.html:
    stageline report outputs/debug

Several over each other, with what differs in their configurations, into ./report.html or another file:
    stageline report outputs/debug outputs/pipeline --output comparison.html

A study's folder stands for its runs; several runs are ranked by their losses, with the settings in which they differ.
The page has curves, measured timelines, plan, configuration and environment. It loads nothing from the network.
"""

from __future__ import annotations

import argparse
import os
from datetime import datetime
from pathlib import Path

from trainer.commands.arguments import Parser
from trainer.errors import ConfigurationError, ExitCode
from trainer.status import is_run

_NAME = "report.html"


def run(argv: list[str]) -> int:
    """Carry out `stageline report`. Raises ConfigurationError for wrong arguments and folders that are no run's."""
    from trainer.config.schema import Config
    from trainer.report.page import page
    from trainer.report.run import read_runs

    arguments = _parser().parse_args(argv)
    runs = read_runs([folder for given in arguments.run_folders for folder in _folders(given)])
    output = arguments.output or (runs[0].path / _NAME if len(runs) == 1 else Path(_NAME))
    defaults = {
        f"{table}.{key}": value
        for table, values in Config().model_dump(exclude_none=True).items()
        for key, value in values.items()
    }
    _write(output, page(runs, defaults, datetime.now()))
    for each in runs:
        for problem in each.problems:
            print(f"{each.name}: {problem}")
    print(f"wrote {output}")
    return ExitCode.DONE


def _folders(given: Path) -> list[Path]:
    """A folder that is no run's but holds some, such as a study's, stands for them."""
    below = [] if is_run(given) or not given.is_dir() else sorted(filter(is_run, given.iterdir()))
    return below or [given]


def _write(path: Path, text: str) -> None:
    """Readers see the whole page or the former one."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="stageline report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_folders", nargs="+", type=Path, metavar="RUN_FOLDER", help="of one run each")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="the page (default: report.html in the run folder, or here for several)",
    )
    return parser
