"""Traces of torch's profiler and snapshots of the device's memory, every so many steps."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from trainer.config.schema import Profiling
from trainer.loop import StepResult

logger = logging.getLogger(__name__)

_WARM_UP_STEPS = 1
_SNAPSHOT_ENTRIES = 100_000


class Profiler:
    """A listener of the loop; does nothing where nothing is configured."""

    def __init__(self, config: Profiling, folder: Path, rank: int, device: torch.device) -> None:
        self._traces = folder / config.save_traces_folder
        self._snapshots = folder / config.save_memory_snapshot_folder
        self._freq = config.profile_freq
        self._rank = rank
        self._profile = self._start_profile(device) if config.enable_profiling else None
        self._snapshot = config.enable_memory_snapshot and device.type == "cuda"
        if config.enable_memory_snapshot and not self._snapshot:
            logger.warning(
                "profiling.enable_memory_snapshot: only CUDA devices record their memory's history"
            )
        if self._snapshot:
            torch.cuda.memory._record_memory_history(max_entries=_SNAPSHOT_ENTRIES)

    def before_step(self, step: int) -> None: ...

    def after_step(self, result: StepResult) -> None:
        if self._profile is not None:
            self._profile.step()
        if self._snapshot and result.step % self._freq == 0:
            path = self._file(self._snapshots, result.step, "pickle")
            path.write_bytes(pickle.dumps(torch.cuda.memory._snapshot()))

    def close(self) -> None:
        """End recording; a trace in the making is dropped."""
        if self._profile is not None:
            self._profile.stop()
        if self._snapshot:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _start_profile(self, device: torch.device) -> profile:
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        wait = max(0, self._freq - _WARM_UP_STEPS - 1)
        recorder = profile(
            activities=activities,
            schedule=schedule(wait=wait, warmup=_WARM_UP_STEPS, active=1),
            on_trace_ready=self._write_trace,
        )
        recorder.start()
        return recorder

    def _write_trace(self, recorder: profile) -> None:
        recorder.export_chrome_trace(str(self._file(self._traces, recorder.step_num, "json")))

    def _file(self, folder: Path, step: int, suffix: str) -> Path:
        target = folder / f"step-{step}"
        target.mkdir(parents=True, exist_ok=True)
        return target / f"rank_{self._rank}.{suffix}"
