"""What the tests of the configuration share: loading, and the report of what is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from trainer.config.load import load
from trainer.config.rules import check, check_for_training
from trainer.config.schema import Config
from trainer.errors import ConfigurationError

ROOT = Path(__file__).resolve().parents[2]


def config_of(*arguments: str) -> Config:
    """The debug configuration with the arguments."""
    return load(arguments).config


def report_of(*arguments: str, world_size: int | None = None) -> str:
    """The report that refuses the arguments, or "" if nothing does.

    With a world size, as for training on this machine.
    """
    try:
        loaded = load(arguments)
        if world_size is not None:
            check_for_training(loaded, world_size)
    except ConfigurationError as error:
        return str(error)
    return ""


def rules_broken(*arguments: str, world_size: int | None = None) -> list[str]:
    """The messages of the rules that the arguments break."""
    loaded = load(arguments)
    return [problem.line(loaded.given, "debug.toml") for problem in check(loaded.config, world_size)]


def run_python(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Python with the repository on its path."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=environment, cwd=cwd, check=False
    )
