"""Where the runs took place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainer.report.html import Html
from trainer.report.loose import Loose
from trainer.report.run import Run
from trainer.report.widgets import Fact, comparison, facts, note, section
from trainer.report.words import literal, memory

_NAMES = {
    "started": "Started",
    "command": "Command",
    "stageline": "Stageline",
    "python": "Python",
    "torch": "PyTorch",
    "cuda": "CUDA",
    "nccl": "NCCL",
    "device": "Device",
    "devices_per_host": "Devices of a host",
    "device_memory_bytes": "Memory of a device",
    "hosts": "Hosts",
    "ranks": "Ranks",
    "host": "Host of rank 0",
    "processor": "Processor",
    "cores": "Cores",
    "threads": "Threads of a process",
    "platform": "Platform",
}


def environment(runs: Sequence[Run]) -> Html:
    """The section about the environment."""
    missing = "environment.json is written when a run starts; here there is none."
    if not any(run.environment.members() for run in runs):
        return section("environment", "Environment", note(missing))
    columns = [list(_facts(run.environment)) for run in runs]
    if len(runs) == 1:
        return section("environment", "Environment", facts(columns[0]))
    return section("environment", "Environment", comparison([run.name for run in runs], columns))


def _facts(data: Loose) -> Iterator[Fact]:
    """The known keys by their names in a fixed order, then whatever else is there."""
    members = data.members()
    for key in [*(key for key in _NAMES if key in members), *(key for key in members if key not in _NAMES)]:
        value = members[key]
        if value.value is not None:
            yield Fact(_NAMES.get(key, key), _shown(key, value))


def _shown(key: str, value: Loose) -> str:
    if key.endswith("_bytes"):
        return memory(value.number())
    return value.value if isinstance(value.value, str) else literal(value.value)
