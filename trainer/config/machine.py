"""What this machine has, told without torch: GPUs, memory, cores."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class Machine:
    """`gpus`: CUDA devices that processes here can see. `memory`: bytes that they may use. `cores`: theirs."""

    gpus: int
    memory: int
    cores: int


def this_machine() -> Machine:
    """The machine that this process runs on, within the limits of its container."""
    return Machine(visible_gpus(), _memory(), len(os.sched_getaffinity(0)))


def visible_gpus(devices: Path = Path("/dev")) -> int:
    """How many CUDA devices there are, of those that CUDA_VISIBLE_DEVICES leaves."""
    there = sum(path.name.removeprefix("nvidia").isdecimal() for path in devices.glob("nvidia[0-9]*"))
    if not there and (devices / "dxg").exists():  # Windows' subsystem for Linux: one device for all GPUs
        there = 1
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return there
    # As CUDA reads it: up to the first entry that is no device.
    visible = 0
    for entry in named.split(","):
        if not entry.strip() or entry.strip().startswith("-"):
            break
        visible += 1
    return min(there, visible)


def _memory() -> int:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = (
        _read_limit(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory/memory.limit_in_bytes")
    )
    return min(total, *limits)


def _read_limit(path: Path) -> int:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return _NO_LIMIT  # no such control group: nothing is limited
    return int(text) if text.isdecimal() else _NO_LIMIT
