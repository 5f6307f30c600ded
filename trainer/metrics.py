"""metrics.jsonl: one JSON object for each logged step, appended, and never a step twice."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE_NAME = "metrics.jsonl"


class MetricsFile:
    """The metrics of a run, across all its restarts. On one rank only."""

    def __init__(self, folder: Path, resumed_step: int) -> None:
        """Drop what was logged after `resumed_step`, which the run is about to do again, and open for appending."""
        self._path = folder / FILE_NAME
        folder.mkdir(parents=True, exist_ok=True)
        _truncate(self._path, resumed_step)
        self._file = self._path.open("a", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row; a number that is not finite becomes null, which JSON has."""
        clean = {key: None if _not_finite(value) else value for key, value in row.items()}
        self._file.write(json.dumps(clean) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All rows; a last line that was torn by a kill is left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break  # what follows a torn line was written by nobody
    return rows


def _truncate(path: Path, step: int) -> None:
    rows = read_metrics(path)
    kept = [row for row in rows if row.get("step", 0) <= step]
    if not path.exists() or (len(kept) == len(rows) and path.read_bytes().endswith(b"\n")):
        return
    # A new file under the old name: a kill in between leaves the old one whole.
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    os.replace(partial, path)


def _not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
