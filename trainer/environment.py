"""Where a run takes place: the program's versions, the devices, the hosts. Written into its folder at each start."""

from __future__ import annotations

import os
import platform
import shlex
import socket
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from trainer import __version__
from trainer.secrets import redact


def describe_environment(world_size: int) -> dict[str, Any]:
    """The environment of this rank as plain data; what does not exist here or cannot be known is None.

    `hosts` assumes as many ranks on every host as on this one. Counts are numbers, memory is in bytes, the time
    is local with its offset.
    """
    import torch

    return {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": redact(shlex.join(sys.argv)),
        "stageline": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **_devices(),
        "hosts": _hosts(world_size),
        "ranks": world_size,
        "host": socket.gethostname(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
    }


def _devices() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return {
            "device": "CPU",
            "devices_per_host": None,
            "device_memory_bytes": None,
            "cuda": None,
            "nccl": None,
        }
    return {
        "device": torch.cuda.get_device_name(),
        "devices_per_host": torch.cuda.device_count(),
        "device_memory_bytes": torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version()))
        if torch.distributed.is_nccl_available()
        else None,
    }


def _hosts(world_size: int) -> int | None:
    """From the number of this host's ranks, which the launcher tells."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "1" if world_size == 1 else "")
    return -(-world_size // int(local)) if local.isdecimal() and int(local) > 0 else None


def _processor() -> str | None:
    """The model of the processor, as Linux tells it, else the kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine() or None
