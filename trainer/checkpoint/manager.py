"""Checkpoints of a run: when to save, how a save becomes valid, and which one to go on from.

A save goes through four steps; until the last one nothing that counts as a checkpoint exists:

    1. rank 0 makes step-N.partial               anything of this step that was left there is removed
    2. all ranks write their tensors             torch.distributed.checkpoint, synchronised to disk
    3. each rank checksums its own files
    4. rank 0 writes the manifest and renames    step-N.partial -> step-N

If one fails on any rank, all ranks learn it, the partial folder is removed, and training goes on with the last
valid checkpoint untouched. An asynchronous save would copy what `_collect` returns and run `_write` elsewhere.
"""

from __future__ import annotations

import logging
import shutil
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from trainer.checkpoint import folders
from trainer.checkpoint.agreement import FailedOnSomeRank, Ranks
from trainer.checkpoint.manifest import (
    Contents,
    InvalidCheckpoint,
    Manifest,
    checksum_problems,
    describe_files,
    write_manifest,
)
from trainer.checkpoint.restore import choose_step, restore_full, restore_rng, restore_weights
from trainer.checkpoint.state import StateDict, TrainState, full_state_dict, train_json, weights_state_dict
from trainer.checkpoint.storage import CheckpointReader, files_of_rank, write_tensors
from trainer.errors import ConfigurationError

if TYPE_CHECKING:
    from trainer.config.schema import Checkpoint

logger = logging.getLogger(__name__)

_LATEST = -1  # checkpoint.load_step


class Verification(Enum):
    """How a checkpoint is verified before it is loaded."""

    CHECKSUMS = "checksums"  # reads every file once, shared among the ranks
    SIZES = "sizes"


@dataclass(frozen=True)
class _Opened:
    """A verified checkpoint, ready to be read."""

    path: Path
    manifest: Manifest
    reader: CheckpointReader


class CheckpointManager:
    """Saves and loads the state of a run. Every method is collective over all ranks.

    It works on any number of ranks of any layout, and in a single process without a process group.
    """

    def __init__(
        self,
        folder: Path,
        config: Checkpoint,
        *,
        layout: str,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        verification: Verification = Verification.CHECKSUMS,
    ) -> None:
        """
        Args:
            folder: where the checkpoints lie; made when the first one is saved.
            config: the table [checkpoint].
            layout: the mesh in words. Random states are restored only where it and the world size are equal.
            device: where this rank computes.
            group: the ranks that take part; None: all, or this process alone without a process group.
            verification: of what is loaded; files and sizes are always verified.
        """
        self._folder = folder
        self._config = config
        self._layout = layout
        self._device = device
        self._ranks = Ranks(group)
        self._verification = verification
        self._last_saved_step: int | None = None
        self._last_save_time = time.monotonic()

    def maybe_save(self, step: int, state: TrainState, *, last: bool = False) -> Path | None:
        """Save if the configured interval has passed, or if this is the last step of the run.

        Args:
            step: training steps made.
            state: the run.
            last: whether the run ends with this step; then a weights-only checkpoint is written if configured.

        Returns:
            The checkpoint's folder; None if none was written.
        """
        if not self._config.enable_checkpoint or step == self._last_saved_step:
            return None
        return self.save(step, state, last=last) if last or self._is_due(step) else None

    def save(self, step: int, state: TrainState, *, last: bool = False) -> Path | None:
        """Save now, e.g. since the job is asked to stop. Returns the folder, or None if the save failed."""
        started = time.monotonic()
        self._last_save_time = started
        contents = Contents.WEIGHTS if last and self._config.model_weights_only else Contents.FULL
        try:
            path = self._write(step, self._collect(step, state, contents), contents)
        except FailedOnSomeRank as error:
            self._give_up(step, error)
            return None
        self._last_saved_step = step
        logger.info("checkpoint %s saved in %.1f s", path, time.monotonic() - started)
        self._remove_old(step)
        return path

    def save_seed(self, state: TrainState) -> Path:
        """Save the initial parameters alone, in their own precision, as step 0.

        Raises:
            FailedOnSomeRank: it could not be written; there is nothing else that the run was for.
        """
        return self._write(0, weights_state_dict(state.model_parts, None), Contents.WEIGHTS)

    def load(self, state: TrainState) -> int | None:
        """Set `state` to that of the latest valid checkpoint, or to that of the configured step.

        Damaged and incomplete checkpoints are named and passed over. One that holds only weights is passed
        over too, unless it is of step 0: a run starts from it as from its initial parameters.

        Returns:
            Training steps made; None if there is nothing to load.

        Raises:
            ConfigurationError: the configured step has no valid checkpoint, or the checkpoint is of another
                model; on all ranks.
            FailedOnSomeRank: a rank could not read it.
        """
        if not self._config.enable_checkpoint:
            return None
        for name in self._ranks.on_first(lambda: folders.remove_leftovers(self._folder)):
            self._say(f"{self._folder / name}: left by a save that did not finish; cleaned up")
        step = self._config.load_step
        opened = self._open_latest() if step == _LATEST else self._open_configured(step)
        if opened is None:
            return None
        step = self._restore(opened, state)
        self._last_saved_step = step
        logger.info("going on from %s", opened.path)
        return step

    # Saving

    def _is_due(self, step: int) -> bool:
        if self._config.interval_type == "steps":
            return step % self._config.interval == 0
        # Clocks differ among ranks, and a rank that saved alone would wait for ever: rank 0's clock decides.
        elapsed = time.monotonic() - self._last_save_time
        return self._ranks.first(elapsed >= self._config.interval, self._device)

    def _collect(self, step: int, state: TrainState, contents: Contents) -> StateDict:
        """What this rank has to write; refers to the live tensors, so it must be written or copied at once."""
        if contents is Contents.WEIGHTS:
            dtype = getattr(torch, self._config.export_dtype)
            return self._ranks.agreed(lambda: weights_state_dict(state.model_parts, dtype))
        if len(set(self._ranks.gather(train_json(state, step)))) > 1:
            raise FailedOnSomeRank("the ranks disagree about step, schedule, data position or counters")
        return self._ranks.agreed(lambda: full_state_dict(state, step, self._ranks.rank, self._device))

    def _write(self, step: int, tensors: StateDict, contents: Contents) -> Path:
        """The four steps of the module's docstring. Raises FailedOnSomeRank on all ranks."""
        ranks, partial = self._ranks, folders.partial_folder(self._folder, step)
        ranks.on_first(lambda: folders.make_partial(self._folder, step))
        write_tensors(partial, tensors, ranks.group)
        own = ranks.agreed(lambda: describe_files(partial, files_of_rank(partial, ranks.rank)))
        files = tuple(entry for entries in ranks.gather(own) for entry in entries)
        manifest = Manifest(step, contents, self._layout, ranks.size, files)
        return ranks.on_first(lambda: self._publish(manifest))

    def _publish(self, manifest: Manifest) -> Path:
        write_manifest(folders.partial_folder(self._folder, manifest.step), manifest)
        return folders.publish(self._folder, manifest.step)

    def _give_up(self, step: int, error: FailedOnSomeRank) -> None:
        """Remove what was written, which may be what filled the disk, and say so."""
        if self._ranks.rank != 0:
            return
        valid = [
            str(found.path) for found in folders.list_checkpoints(self._folder) if found.manifest is not None
        ]
        logger.error(
            "CHECKPOINT NOT SAVED at step %d: %s. Training goes on; the latest valid checkpoint is %s",
            step,
            error,
            valid[0] if valid else "none",
        )
        shutil.rmtree(folders.partial_folder(self._folder, step), ignore_errors=True)

    def _remove_old(self, step: int) -> None:
        if self._ranks.rank != 0:
            return
        try:
            for removed in folders.apply_retention(self._folder, self._config.keep_latest_k, step):
                logger.debug("removed the checkpoint of step %d", removed)
        except OSError as error:
            # Not worth a training run; what could not be removed is tried again at the next save.
            logger.warning("could not remove an old checkpoint: %s", error)

    # Loading

    def _open_latest(self) -> _Opened | None:
        for found in self._listed():
            if _is_export(found):
                self._say(f"{found.path} holds only weights, to go on needs more; passed over")
                continue
            try:
                return self._open(found)
            except InvalidCheckpoint as error:
                self._say(f"CHECKPOINT PASSED OVER: {found.path} is not valid: {error}")
        return None

    def _open_configured(self, step: int) -> _Opened:
        listed = self._listed()
        found = choose_step(self._folder, step, listed)
        if _is_export(found):
            raise ConfigurationError(
                f"checkpoint.load_step = {step}: {found.path} holds only weights, to go on needs more"
            )
        later = ", ".join(str(other.step) for other in listed if other.step > step)
        if later:
            self._say(
                f"checkpoints of later steps ({later}) are left alone; checkpoint.load_step = -1 would load those"
            )
        try:
            return self._open(found)
        except InvalidCheckpoint as error:
            raise ConfigurationError(
                f"checkpoint.load_step = {step}: {found.path} is not valid: {error}"
            ) from error

    def _listed(self) -> list[folders.Found]:
        return self._ranks.on_first(lambda: folders.list_checkpoints(self._folder))

    def _open(self, found: folders.Found) -> _Opened:
        """Verify a checkpoint, its files shared among the ranks. Raises InvalidCheckpoint on all ranks."""
        if found.manifest is None:
            raise InvalidCheckpoint(str(found.problem))
        problems: tuple[str, ...] = ()
        if self._verification is Verification.CHECKSUMS:
            problems = checksum_problems(
                found.path, found.manifest.files[self._ranks.rank :: self._ranks.size]
            )
        reader = None
        if not problems:
            try:
                reader = CheckpointReader(found.path)
            except InvalidCheckpoint as error:
                problems = (str(error),)
        everywhere = [problem for of_rank in self._ranks.gather(problems) for problem in of_rank]
        if everywhere or reader is None:
            raise InvalidCheckpoint("; ".join(dict.fromkeys(everywhere)))
        return _Opened(found.path, found.manifest, reader)

    def _restore(self, opened: _Opened, state: TrainState) -> int:
        if opened.manifest.contents is Contents.WEIGHTS:
            restore_weights(opened.reader, state.model_parts, self._ranks)
            return opened.manifest.step
        exclude = self._config.exclude_from_loading
        step = restore_full(opened.reader, state, self._ranks, exclude)
        if (opened.manifest.layout, opened.manifest.world_size) == (self._layout, self._ranks.size):
            restore_rng(opened.reader, self._ranks, self._device)
        else:
            self._say(
                f"{opened.path} was saved by {opened.manifest.world_size} ranks ({opened.manifest.layout}): "
                "parameters, optimizer and data go on exactly; random generators start anew"
            )
        return step

    def _say(self, message: str) -> None:
        if self._ranks.rank == 0:
            logger.warning(message)


def _is_export(found: folders.Found) -> bool:
    """Whether it is the weights-only result of a run, rather than a seed (step 0) to start from."""
    return found.manifest is not None and found.manifest.contents is Contents.WEIGHTS and found.step != 0
