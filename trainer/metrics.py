"""metrics.jsonl: one JSON object for each logged step, appended, and never a step twice."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.checkpoint.local import sync_folder

logger = logging.getLogger(__name__)

FILE_NAME = "metrics.jsonl"


class MetricsFile:
    """The metrics of a run, across all its restarts. On one rank only.

    A line is written whole and at once, so a kill tears at most the last one, which the next start drops.
    """

    def __init__(self, folder: Path, resumed_step: int) -> None:
        """Drop what was logged after `resumed_step`, which the run is about to do again, and open for appending."""
        self._path = folder / FILE_NAME
        folder.mkdir(parents=True, exist_ok=True)
        _drop_after(self._path, resumed_step)
        self._file = self._path.open("ab", buffering=0)
        self._torn = False

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row. A number that is not finite becomes null: NaN is no JSON, and other programs read this."""
        clean = {key: None if _is_not_finite(value) else value for key, value in row.items()}
        line = json.dumps(clean, allow_nan=False).encode() + b"\n"
        # A line that could not be written whole is ended, so that it does not spoil the next one.
        text = b"\n" + line if self._torn else line
        try:
            self._torn = self._file.write(text) != len(text)
        except OSError as error:
            # A full disk costs a row, not the run.
            self._torn = True
            logger.error("the metrics of step %s could not be written: %s", row.get("step"), error)

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All rows; what is left of a line that was torn by a kill is left out."""
    return [line.row for line in _lines(path)]


@dataclass(frozen=True)
class _Line:
    text: bytes
    row: dict[str, Any]


def _lines(path: Path) -> Iterator[_Line]:
    if not path.exists():
        return
    for text in path.read_bytes().split(b"\n"):
        try:
            row = json.loads(text)
        except ValueError:  # torn, or the empty rest after the last line
            continue
        if isinstance(row, dict):
            yield _Line(text, row)


def _drop_after(path: Path, step: int) -> None:
    """Rewrite the file without later steps and torn lines; the lines that stay are kept byte for byte."""
    if not path.exists():
        return
    kept = b"".join(line.text + b"\n" for line in _lines(path) if line.row.get("step", 0) <= step)
    if kept == path.read_bytes():
        return
    # A new file under the old name: a kill or a power cut in between leaves one of them whole.
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(kept)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_folder(path.parent)


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
