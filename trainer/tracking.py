"""Metrics in TensorBoard and Weights & Biases, across restarts of a run."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from trainer.config.schema import Config
from trainer.errors import ConfigurationError


class Tracker(Protocol):
    """A place that takes the numbers of a step."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def open_trackers(config: Config, folder: Path, name: str, resumed_step: int) -> list[Tracker]:
    """The configured trackers. Raises ConfigurationError if a package is missing. On one rank only."""
    trackers: list[Tracker] = []
    if config.metrics.enable_tensorboard:
        trackers.append(_TensorBoard(folder / config.metrics.save_tb_folder, resumed_step))
    if config.metrics.enable_wandb:
        trackers.append(_WeightsAndBiases(config, folder, name))
    return trackers


class _TensorBoard:
    def __init__(self, folder: Path, resumed_step: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        # Steps after the checkpoint come again: the old ones are hidden.
        self._writer = SummaryWriter(str(folder), purge_step=resumed_step + 1 if resumed_step else None)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    def __init__(self, config: Config, folder: Path, name: str) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigurationError(
                "metrics.enable_wandb = true: the package wandb is not installed; pip install 'stageline[wandb]'"
            ) from error
        id_file = folder / "wandb_run_id"
        run_id = id_file.read_text().strip() if id_file.exists() else secrets.token_hex(4)
        folder.mkdir(parents=True, exist_ok=True)
        id_file.write_text(run_id + "\n")
        self._run = wandb.init(
            id=run_id, resume="allow", dir=str(folder), name=name, config=config.model_dump(mode="json")
        )
        # The step is a value of its own: after a restart it goes back to the checkpoint, which wandb's own
        # counter refuses.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def close(self) -> None:
        self._run.finish()
