"""The flight recorder of collectives: the last ones of each rank, written when a job fails.

It is torch's own. Of gloo it knows when a collective was issued, of NCCL also when it began and ended; sends and
receives of the pipeline stand in the rank's status and in the log of actions instead.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch._C._distributed_c10d as c10d

_SIZE = "TORCH_FR_BUFFER_SIZE"


def enable(entries: int) -> None:
    """Keep the last `entries` collectives, 0: none. Takes effect in process groups that are formed afterwards."""
    os.environ[_SIZE] = str(entries)


def write(folder: Path, rank: int) -> Path | None:
    """Write flight_recorder_rank_N.json into the folder; None if nothing was recorded."""
    if os.environ.get(_SIZE, "0") == "0":
        return None
    # A build for CUDA records NCCL apart from the rest; what is there depends on the build.
    dumps = {
        name: getattr(c10d, function)
        for name, function in (("nccl", "_dump_nccl_trace_json"), ("gloo", "_dump_fr_trace_json"))
        if hasattr(c10d, function)
    }
    recorded = [f'"{name}": {_text(dump())}' for name, dump in dumps.items()]
    if not recorded:
        return None
    path = folder / f"flight_recorder_rank_{rank}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text("{" + ", ".join(recorded) + "}\n", encoding="utf-8")
    return path


def _text(json: str | bytes) -> str:
    return json if isinstance(json, str) else json.decode(errors="replace")
