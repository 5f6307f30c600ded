"""Where a run stands, told from its folder: without torch, and without reading more of a file than its end."""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import tomli

from trainer.errors import ConfigurationError, ExitCode
from trainer.metrics import FILE_NAME as METRICS
from trainer.run_state import Phase, RunState, read_state

_MARKS = ("config.toml", "metrics.jsonl", "state.json", "plan.json")
_END = 2**16  # bytes of a file's end that are read
_STEP = re.compile(r"step-(0|[1-9][0-9]{0,17})")
_LOGGED = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) rank (\d+) (\w+) (.*)")
_PATIENCE = 3.0  # times that a run may take between two logged steps, before it counts as stale


class Standing(StrEnum):
    """Of a run, as far as its folder tells."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"  # on request: the same command goes on
    FAILED = "failed"
    KILLED = "killed"  # its process is gone, without a word
    STALE = "stale"  # on another machine, and nothing was written for long
    UNKNOWN = "unknown"  # no run, or one that has not begun


@dataclass(frozen=True)
class LoggedError:
    """An entry of a rank's log. `text`: with what follows it, such as a stack."""

    when: str
    rank: int
    text: str


@dataclass(frozen=True)
class Status:
    """One run.

    Attributes:
        step, steps: the last one that is logged, and how many there shall be.
        loss, validation_loss: logged last.
        tokens_per_second: median of what was logged lately.
        seconds_left: of training, at the speed of late; only while it runs.
        checkpoint: step of the last one that is whole.
        quiet: seconds since anything was written.
        exit_code, error: of a failed run.
    """

    folder: Path
    standing: Standing
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    validation_loss: float | None = None
    tokens_per_second: float | None = None
    seconds_left: float | None = None
    checkpoint: int | None = None
    quiet: float | None = None
    host: str | None = None
    job: str | None = None
    exit_code: int | None = None
    error: str | None = None

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        return self.standing is Standing.FINISHED


def read_status(folder: Path, now: float | None = None) -> Status:
    """The status of one run. A file that is missing or damaged leaves unknown what it would have told."""
    now = time.time() if now is None else now
    config = _toml(folder / "config.toml")
    rows = _rows(folder / METRICS)
    failure = _json(folder / "failure.json")
    state = read_state(folder)
    logged = [row for row in rows if "loss" in row]
    steps = _at(config, "training", "steps", int)
    last = logged[-1] if logged else {}
    step = state.step if state is not None and state.step is not None else last.get("step")
    quiet = _quiet(folder, now)
    seconds = _median(row.get("step_seconds") for row in logged[-10:])
    standing = _standing(state, failure, step, steps, quiet, _longest_silence(config, seconds))
    left = None
    if standing is Standing.RUNNING and seconds and step is not None and steps is not None:
        left = max(0.0, (steps - step) * seconds)
    failed = standing is Standing.FAILED
    return Status(
        folder,
        standing,
        step,
        steps,
        last.get("loss"),
        next((row["validation_loss"] for row in reversed(rows) if "validation_loss" in row), None),
        _median(row.get("tokens_per_second") for row in logged[-10:]),
        left,
        _checkpoint(folder / str(_at(config, "checkpoint", "folder", str) or "checkpoint")),
        quiet,
        state.host if state else None,
        state.job if state else None,
        failure.get("exit_code") if failed else None,
        _reason(failure) if failed else None,
    )


def read_errors(folder: Path) -> list[LoggedError]:
    """Errors and warnings' betters of all ranks, merged by time: the first one first. Of each log, its end."""
    found = [
        error for path in (folder / "logs").glob("rank_*.log") for error in _errors(_end(path).splitlines())
    ]
    return sorted(found, key=lambda error: (error.when, error.rank))


def _standing(
    state: RunState | None,
    failure: Mapping[str, Any],
    step: int | None,
    steps: int | None,
    quiet: float | None,
    patience: float,
) -> Standing:
    if failure:
        stopped = failure.get("exit_code") == ExitCode.STOPPED_ON_REQUEST
        return Standing.STOPPED if stopped else Standing.FAILED
    if state is None:
        return Standing.UNKNOWN
    if state.phase is Phase.FINISHED:
        # More steps may be asked for than it was to make when it ended.
        return Standing.FINISHED if steps is None or step is None or step >= steps else Standing.STOPPED
    if state.phase is Phase.STOPPED:
        return Standing.STOPPED
    if state.is_here:
        return Standing.RUNNING if state.process_lives else Standing.KILLED
    return Standing.STALE if quiet is not None and quiet > patience else Standing.RUNNING


def _longest_silence(config: Mapping[str, Any], seconds: float | None) -> float:
    """Seconds: after so many the watchdog of a rank would have ended the job."""
    start = _at(config, "comm", "init_timeout_seconds", int) or 300
    limit = _at(config, "comm", "train_timeout_seconds", int) or 100
    between = (_at(config, "metrics", "log_freq", int) or 10) * (seconds or 0.0)
    return max(start, limit + _PATIENCE * between)


def _checkpoint(folder: Path) -> int | None:
    """The manifest is written last."""
    try:
        steps = [int(match[1]) for each in folder.iterdir() if (match := _STEP.fullmatch(each.name))]
    except OSError:
        return None
    whole = (
        step for step in sorted(steps, reverse=True) if (folder / f"step-{step}/manifest.json").is_file()
    )
    return next(whole, None)


def _quiet(folder: Path, now: float) -> float | None:
    times = []
    for path in (folder / METRICS, folder / "state.json", *(folder / "logs").glob("rank_*.log")):
        try:
            times.append(path.stat().st_mtime)
        except OSError:
            continue
    return max(0.0, now - max(times)) if times else None


def _reason(failure: Mapping[str, Any]) -> str:
    reason, rank = str(failure.get("reason", "")), failure.get("rank")
    if failure.get("exit_code") == ExitCode.RANK_FAILED:
        reason = f"rank {rank} {reason}"
    return " ".join(reason.split())


def _errors(lines: list[str]) -> Iterator[LoggedError]:
    current: LoggedError | None = None
    for line in lines:
        match = _LOGGED.fullmatch(line)
        if match is None:
            if current is not None:
                current = LoggedError(current.when, current.rank, f"{current.text}\n{line}")
            continue
        if current is not None:
            yield current
        serious = match[3] in ("ERROR", "CRITICAL")
        current = LoggedError(match[1], int(match[2]), match[4]) if serious else None
    if current is not None:
        yield current


# Folders


def run_folders(given: Path) -> list[Path]:
    """The run in a folder, or the runs below it. Raises ConfigurationError if there are none."""
    if not given.is_dir():
        raise ConfigurationError(f"there is no folder {given}")
    if is_run(given):
        return [given]
    below = sorted(each for each in given.iterdir() if each.is_dir() and is_run(each))
    if not below:
        raise ConfigurationError(f"{given} is not the folder of a run, nor are there any in it")
    return below


def is_run(folder: Path) -> bool:
    """Whether a run has written into the folder."""
    return any((folder / mark).exists() for mark in _MARKS)


# Files


def _end(path: Path) -> str:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _END))
            content = file.read()
    except OSError:
        return ""
    # Where the file does not begin, a line does not either.
    return (content if size <= _END else content.partition(b"\n")[2]).decode("utf-8", "replace")


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = []
    for line in _end(path).splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomli.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _at(config: Mapping[str, Any], table: str, key: str, kind: type) -> Any:
    value = config.get(table, {}).get(key) if isinstance(config.get(table), dict) else None
    return value if isinstance(value, kind) else None


def _median(values: Iterator[Any]) -> float | None:
    known = [value for value in values if isinstance(value, int | float)]
    return statistics.median(known) if known else None
