"""The flight recorder: as many collectives as configured, none with 0. What a failed job writes is in test_drills."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import free_port, run_ranks
from trainer import flight_recorder


def record(rank: int, port: int, entries: int, folder: Path) -> list[str]:
    """Seven collectives on two ranks; the names of those that were written."""
    flight_recorder.enable(entries)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    for _ in range(7):
        dist.all_reduce(torch.ones(3))
    path = flight_recorder.write(folder / "logs", rank)
    if path is None:
        return []
    return [entry["profiling_name"] for entry in json.loads(path.read_text())["gloo"]["entries"]]


@pytest.mark.parametrize(("entries", "kept"), [(0, 0), (4, 4), (20000, 7)])
def test_the_last_collectives_are_written_as_many_as_configured(
    tmp_path: Path, entries: int, kept: int
) -> None:
    written = run_ranks(record, 2, free_port(), entries, tmp_path, process_group=False)
    assert written == [["gloo:all_reduce"] * kept] * 2
    assert (tmp_path / "logs").exists() == bool(kept)
