"""What a checkpoint costs: how long training waits for it, and how fast it is written and read.

    python benchmarks/checkpoint.py [--gigabytes 1] [--folder FOLDER] [--repeats 5]

On one process, with a model and AdamW's state of random numbers. Prints, for the best of the repeats, taken in turn:

- how long training waits for an asynchronous save against a synchronous one: at most 10 % is the goal. A step is
  made between the saves, for the time that a save takes, so that the next one need not wait for it.
- the speed of a synchronous save, checksums and synchronisation to disk included, against copying the finished
  checkpoint with `shutil.copyfile` and synchronising it, on the same disk.
- the speed of loading, verified in full and by sizes, against reading the files.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from trainer.checkpoint.local import LocalRoot
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.state import TrainState
from trainer.lr_schedule import LearningRateShape, Schedule


class _Data:
    def state_dict(self) -> dict[str, Any]:
        return {"document": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def made_state(gigabytes: float, layers: int = 24) -> TrainState:
    """Parameters and two moments of each, of together so many gigabytes."""
    width = int((gigabytes * 1e9 / 12 / layers) ** 0.5)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    schedule = Schedule(optimizer, 1e-3, LearningRateShape(steps=10, warmup_steps=1))
    return TrainState([model], optimizer, schedule, _Data(), {"tokens": 0})


def manager(folder: Path, mode: str = "disabled", verify: str = "full") -> CheckpointManager:
    settings: Any = SimpleNamespace(
        enable_checkpoint=True,
        interval=1,
        interval_type="steps",
        model_weights_only=False,
        export_dtype="float32",
        keep_latest_k=1,
        load_step=-1,
        exclude_from_loading=(),
        async_mode=mode,
        verify=verify,
    )
    return CheckpointManager(LocalRoot(folder), settings, layout="1", device=torch.device("cpu"))


@dataclass(frozen=True)
class Taken:
    """Seconds of the clock, and of the processor in this thread: the latter hardly depend on what runs beside."""

    clock: float
    processor: float


def taken(action: Callable[[], object]) -> Taken:
    clock, processor = time.perf_counter(), time.thread_time()
    action()
    return Taken(time.perf_counter() - clock, time.thread_time() - processor)


def best(values: list[Taken]) -> Taken:
    """Of all repeats but the first, which warms up."""
    return Taken(min(v.clock for v in values[1:]), min(v.processor for v in values[1:]))


def copy(source: Path, target: Path) -> None:
    target.mkdir()
    for path in source.iterdir():
        shutil.copyfile(path, target / path.name)
        with (target / path.name).open("rb+") as file:
            os.fsync(file.fileno())


def read(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb", buffering=0) as file:
            while file.read(2**22):
                pass


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of the checkpoint")
    parser.add_argument(
        "--folder", type=Path, help="on the disk to be measured; default: the temporary folder"
    )
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    state = made_state(arguments.gigabytes)
    modes = ("disabled", "async", "async_with_pinned_mem")
    times: dict[str, list[Taken]] = {name: [] for name in (*modes, "copy", "read", "full", "sizes")}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        folder = Path(temporary)
        managers = {mode: manager(folder / mode, mode) for mode in modes}
        for repeat in range(arguments.repeats + 1):
            step = repeat + 1
            for mode, checkpoints in managers.items():
                waited = taken(lambda c=checkpoints, s=step: c.maybe_save(s, state))  # type: ignore[misc]
                checkpoints.complete()
                times[mode].append(waited)
            saved = folder / "disabled" / f"step-{step}"
            times["copy"].append(taken(lambda s=saved: copy(s, folder / "copy")))  # type: ignore[misc]
            shutil.rmtree(folder / "copy")
            times["read"].append(taken(lambda s=saved: read(s)))  # type: ignore[misc]
            for verify in ("full", "sizes"):
                loading = manager(folder / "disabled", verify=verify)
                times[verify].append(taken(lambda m=loading: m.load(state)))  # type: ignore[misc]
        size = sum(path.stat().st_size for path in saved.iterdir())
    times_of = {name: best(values) for name, values in times.items()}
    print(f"checkpoint of {size / 1e9:.2f} GB, {arguments.repeats} repeats, {os.cpu_count()} cores")
    whole = times_of["disabled"]
    for mode in modes[1:]:
        waits = times_of[mode]
        print(
            f"training waits, {mode}: {waits.clock:.3f} s of {whole.clock:.3f} s, {waits.clock / whole.clock:.1%}; "
            f"processor {waits.processor:.3f} s of {whole.processor:.3f} s, {waits.processor / whole.processor:.1%}"
        )
    for name, against in (("disabled", "copy"), ("full", "read"), ("sizes", "read")):
        what = "save" if name == "disabled" else f"load, verify = {name}"
        ours, theirs = times_of[name], times_of[against]
        print(
            f"{what}: {size / ours.clock / 1e9:.2f} GB/s against {against} {size / theirs.clock / 1e9:.2f} GB/s, "
            f"ratio {theirs.clock / ours.clock:.2f}; processor {ours.processor:.3f} s against {theirs.processor:.3f} s"
        )


if __name__ == "__main__":
    main()
