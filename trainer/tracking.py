"""Metrics in TensorBoard and Weights & Biases, across restarts of a run: one curve, no step twice."""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from trainer.config.schema import Config
from trainer.errors import ConfigurationError
from trainer.secrets import redact_all

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """A place that takes the numbers of a step."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def open_trackers(config: Config, folder: Path, name: str, resumed_step: int, rank: int = 0) -> list[Tracker]:
    """The configured trackers of a rank; none on ranks other than 0 if metrics.rank_0_only.

    Args:
        config: the whole configuration, which Weights & Biases shows beside the curves.
        folder: the run folder.
        name: of the run.
        resumed_step: training steps made before; 0: the run begins anew.
        rank: where several ranks write, those other than 0 have places of their own.

    Raises:
        ConfigurationError: a package is missing, or Weights & Biases cannot start.
    """
    if rank != 0 and config.metrics.rank_0_only:
        return []
    trackers: list[Tracker] = []
    if config.metrics.enable_tensorboard:
        tensorboard = folder / config.metrics.save_tb_folder
        trackers.append(_TensorBoard(tensorboard / f"rank_{rank}" if rank else tensorboard, resumed_step))
    if config.metrics.enable_wandb:
        trackers.append(_WeightsAndBiases(config, folder, name, resumed_step, rank))
    return trackers


class _TensorBoard:
    def __init__(self, folder: Path, resumed_step: int) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            raise ConfigurationError(
                "metrics.enable_tensorboard = true: the package tensorboard is not installed; "
                "pip install tensorboard"
            ) from error
        # Steps after the checkpoint come again; what was written of them before is hidden.
        self._writer = SummaryWriter(str(folder), purge_step=resumed_step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)
        # A kill must not take with it what metrics.jsonl has.
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


@dataclass(frozen=True)
class _RunRecord:
    """What a restart must know of a run at Weights & Biases: its id, and the last step that was sent."""

    id: str
    last_step: int

    @staticmethod
    def load(path: Path, resumed_step: int) -> _RunRecord:
        """That of the run which is resumed; a run that begins anew is a new one."""
        if resumed_step > 0 and path.exists():
            return _RunRecord(**json.loads(path.read_text()))
        return _RunRecord(secrets.token_hex(4), 0)

    def save(self, path: Path) -> None:
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(json.dumps(asdict(self)) + "\n")
        partial.replace(path)


class _WeightsAndBiases:
    """A run there has one step axis that only goes forward: steps that a resumed run makes again are not sent
    again. They are the same as those before, bit for bit on the same layout."""

    def __init__(self, config: Config, folder: Path, name: str, resumed_step: int, rank: int) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigurationError(
                "metrics.enable_wandb = true: the package wandb is not installed; pip install 'stageline[wandb]'"
            ) from error
        self._path = folder / "wandb" / ("run.json" if rank == 0 else f"run_{rank}.json")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._record = _RunRecord.load(self._path, resumed_step)
        self._record.save(self._path)
        self._sent_before = self._record.last_step
        if self._sent_before > resumed_step:
            logger.info("wandb has the steps up to %d; they are not sent again", self._sent_before)
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "stageline"),
                name=name if rank == 0 else f"{name} rank {rank}",
                id=self._record.id,
                resume="allow",
                dir=str(folder),
                config=redact_all(config.model_dump(mode="json")),
            )
        except wandb.Error as error:
            raise ConfigurationError(
                f"metrics.enable_wandb = true: wandb cannot start: {' '.join(str(error).split())}; "
                "WANDB_MODE=offline keeps the metrics on disk"
            ) from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step <= self._sent_before:
            return
        self._run.log(dict(values), step=step)
        if step != self._record.last_step:
            self._record = _RunRecord(self._record.id, step)
            self._record.save(self._path)

    def close(self) -> None:
        self._run.finish()
