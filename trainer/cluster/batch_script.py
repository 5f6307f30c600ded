"""The batch script of a job, written from a template: a batch script that works by itself, as slurm/train.sbatch.

Options that are given replace the template's lines about the same; `./run_train.sh "$@"` becomes the command.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from trainer.errors import ConfigurationError

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = ROOT / "slurm" / "train.sbatch"

_OPTION = re.compile(r"#SBATCH\s+--([a-z-]+)(?:[= ]\s*(\S+))?.*")
_SHORT = re.compile(r"#SBATCH\s+-\w\b.*")
_LAUNCH = './run_train.sh "$@"'


def read_template(path: Path) -> str:
    """The text of a template. Raises ConfigurationError if it is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"--template {path}: {error.strerror}") from error
    if text.count(_LAUNCH) != 1 or not text.startswith("#!"):
        raise ConfigurationError(f"--template {path}: a batch script with one line {_LAUNCH} is expected")
    if short := next((line for line in text.splitlines() if _SHORT.fullmatch(line)), None):
        raise ConfigurationError(f"--template {path}: {short}: write the option's long name")
    return text


def options_of(template: str) -> dict[str, str]:
    """The options that a template sets itself; "" for one without a value."""
    matches = (_OPTION.fullmatch(line) for line in template.splitlines())
    return {match[1]: match[2] or "" for match in matches if match is not None}


def batch_script(template: str, options: Mapping[str, str], command: str) -> str:
    """The template with these options and this command, as the shell reads it, in it."""
    first, *lines = template.splitlines()
    kept = [line for line in lines if not ((match := _OPTION.fullmatch(line)) and match[1] in options)]
    given = [f"#SBATCH --{name}" + (f"={value}" if value else "") for name, value in options.items()]
    return "\n".join([first, *given, *kept, ""]).replace(_LAUNCH, command)
