"""One rank of torchtitan 0.2.2 on the CPU: its own training program, with what it needs there patched at run time.

Run by against_torchtitan.py under a Python that has torchtitan, with the size of the vocabulary as first argument. torchtitan trains on accelerators
only, so four things are replaced in this process: which device there is; the device's memory figures; a module of
kernels that imports triton; and FSDP's averaging collectives, which gloo does not have, by sums.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
import torch._utils


def _patch_device() -> None:
    torch._utils._get_available_device_type = lambda: "cpu"
    properties = types.SimpleNamespace(total_memory=1 << 34, name="cpu")
    cpu: Any = torch.cpu
    cpu.get_device_name = lambda *_: "cpu"
    cpu.get_device_properties = lambda *_: properties
    cpu.current_device = lambda: 0
    cpu.memory_stats = lambda *_: {}
    cpu.reset_peak_memory_stats = cpu.empty_cache = lambda *_: None
    cpu.set_device = lambda *_: None


def _patch_kernels() -> None:
    kernels = types.ModuleType("torchtitan.models.moe.kernels")
    kernels.generate_permute_indices = None  # type: ignore[attr-defined]  # for mixtures of experts only
    sys.modules[kernels.__name__] = kernels


def _patch_reductions() -> None:
    from torchtitan.models.llama3.infra import parallelize

    shard = parallelize.fully_shard

    def fully_shard_with_sums(module: Any, *args: Any, **keys: Any) -> Any:
        sharded = shard(module, *args, **keys)
        for child in sharded.modules() if hasattr(sharded, "modules") else ():
            if hasattr(child, "set_force_sum_reduction_for_comms"):
                child.set_force_sum_reduction_for_comms(True)
        return sharded

    parallelize.fully_shard = fully_shard_with_sums


def _set_vocabulary(size: int) -> None:
    from torchtitan.models.llama3 import llama3_args

    llama3_args["debugmodel"].vocab_size = size


def main() -> None:
    """Train as the command line says."""
    vocabulary = int(sys.argv.pop(1))
    _patch_device()
    _patch_kernels()
    _patch_reductions()
    _set_vocabulary(vocabulary)
    from torchtitan.train import Trainer
    from torchtitan.train import main as train

    train(Trainer)


if __name__ == "__main__":
    main()
