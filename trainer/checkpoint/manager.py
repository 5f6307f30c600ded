"""Checkpoints of a run: when to save, how a save becomes valid, and which one to go on from.

A save goes through four steps; until the last one nothing that counts as a checkpoint exists:

    1. rank 0 begins step-N                      what was left there of an earlier save is removed
    2. all ranks write their tensors             torch.distributed.checkpoint, synchronised to disk, with checksums
    3. rank 0 writes the manifest                of the files of all ranks
    4. rank 0 publishes step-N                   and removes checkpoints that are no longer wanted

If one fails on any rank, all ranks learn it, what was written is removed, and training goes on with the last valid
checkpoint untouched. An asynchronous save is the same on a thread of each rank, with a process group of their own,
of copies of the tensors. One save at a time: the next one waits until the one before it is done.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from trainer.checkpoint import folders
from trainer.checkpoint.agreement import FailedOnSomeRank, Ranks, describe
from trainer.checkpoint.background import Background, HostCopies
from trainer.checkpoint.filesystem import Folder, Root
from trainer.checkpoint.folders import step_name
from trainer.checkpoint.manifest import (
    Contents,
    InvalidCheckpoint,
    Manifest,
    checksum_problems,
    write_manifest,
)
from trainer.checkpoint.restore import choose_step, restore_full, restore_rng, restore_weights
from trainer.checkpoint.state import StateDict, TrainState, full_state_dict, train_json, weights_state_dict
from trainer.checkpoint.storage import CheckpointReader, write_tensors
from trainer.errors import ConfigurationError

if TYPE_CHECKING:
    from trainer.config.schema import Checkpoint

logger = logging.getLogger(__name__)

_LATEST = -1  # checkpoint.load_step


@dataclass(frozen=True)
class Saved:
    """A checkpoint that this run has saved, and that is valid."""

    step: int
    folder: Folder


@dataclass(frozen=True)
class _Opened:
    """A verified checkpoint, ready to be read."""

    folder: Folder
    manifest: Manifest
    reader: CheckpointReader


class CheckpointManager:
    """Saves and loads the state of a run. Every method is collective over all ranks.

    It works on any number of ranks of any layout, and in a single process without a process group.
    """

    def __init__(
        self,
        root: Root,
        config: Checkpoint,
        *,
        layout: str,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """
        Args:
            root: where the checkpoints lie; made when the first one is saved.
            config: the table [checkpoint].
            layout: the mesh in words. Random states are restored only where it and the world size are equal.
            device: where this rank computes.
            group: the ranks that take part; None: all, or this process alone without a process group.
        """
        self._root = root
        self._config = config
        self._layout = layout
        self._device = device
        self._ranks = Ranks(group)
        self._last_saved_step: int | None = None
        self._last_save_time = time.monotonic()
        self.latest: Saved | None = None
        self.slowest_save = 0.0  # seconds, of those that this run made
        self._background = Background()
        self._asynchronous = config.enable_checkpoint and config.async_mode != "disabled"
        if self._asynchronous:
            self._writers = self._ranks.beside()
            self._copies = HostCopies(device, pinned=config.async_mode == "async_with_pinned_mem")

    def maybe_save(
        self, step: int, state: TrainState, *, last: bool = False, stop: bool = False
    ) -> Folder | None:
        """Save if the configured interval has passed, or if the run ends with this step.

        Args:
            step: training steps made.
            state: the run.
            last: whether this is the last step of the run; then a weights-only checkpoint is written if configured.
            stop: whether the run is asked to stop after this step; like the last, it is saved before this returns.

        Returns:
            The checkpoint's folder; None if none was written, or if it is being written in the background.
        """
        if not self._config.enable_checkpoint:
            return None
        if last or stop:
            self.complete()
        if step == self._last_saved_step:
            return None
        if last or stop:
            return self.save(step, state, last=last)
        return self._start_save(step, state) if self._is_due(step) else None

    def save(self, step: int, state: TrainState, *, last: bool = False) -> Folder | None:
        """Save now, in the foreground. Returns the folder, or None if the save failed."""
        self.complete()
        contents = Contents.WEIGHTS if last and self._config.model_weights_only else Contents.FULL
        started = self._last_save_time = time.monotonic()
        try:
            tensors = self._collect(step, state, contents)
        except FailedOnSomeRank as error:
            self._give_up(step, error)
            return None
        if not self._save(step, tensors, contents, self._ranks):
            return None
        assert self.latest is not None
        logger.info("checkpoint %s saved in %.1f s", self.latest.folder, time.monotonic() - started)
        return self.latest.folder

    def complete(self) -> None:
        """Wait until a save in the background, if there is one, is done. Raises what is no failure of writing."""
        if self._background.busy:
            logger.info("waiting for the checkpoint that is being written")
        self._background.wait()

    def save_seed(self, state: TrainState) -> Folder:
        """Save the initial parameters alone, in their own precision, as step 0.

        Raises:
            FailedOnSomeRank: it could not be written; there is nothing else that the run was for.
        """
        return self._write(0, weights_state_dict(state.model_parts, None), Contents.WEIGHTS, self._ranks)

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
        self.complete()
        for name in self._ranks.on_first(lambda: self._root.clean_up(folders.STEP_NAME)):
            self._say(f"{self._root}/{name}: left by a save that did not finish; cleaned up")
        step = self._config.load_step
        opened = self._open_latest() if step == _LATEST else self._open_configured(step)
        if opened is None:
            return None
        step = self._restore(opened, state)
        self._last_saved_step = step
        logger.info("going on from %s", opened.folder)
        return step

    def go_back(self, state: TrainState, before: int) -> int | None:
        """Set `state` to that of the latest valid whole checkpoint of a step before `before`, and return the step.

        None, and nothing has changed, if there is none. Raises as `load` does.
        """
        self.complete()
        opened = self._open_latest(before)
        return None if opened is None else self._restore(opened, state)

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

    def _start_save(self, step: int, state: TrainState) -> Folder | None:
        """Save in the background if that is configured; the ranks wait for the copies alone."""
        if not self._asynchronous:
            return self.save(step, state)
        started = self._last_save_time = time.monotonic()
        self.complete()
        waited = time.monotonic() - started
        try:
            tensors = self._collect(step, state, Contents.FULL)
            copies, wait_for_copies = self._ranks.agreed(lambda: self._copies.copy(tensors))
        except FailedOnSomeRank as error:
            self._give_up(step, error)
            return None
        blocked = time.monotonic() - started

        def write() -> None:
            wait_for_copies()
            if self._save(step, copies, Contents.FULL, self._writers):
                took = time.monotonic() - started
                text = "checkpoint %s saved in %.1f s, for which training waited %.2f s"
                logger.info(text, self._root.folder(step_name(step)), took, blocked)

        self._last_saved_step = step
        self._background.start(write)
        if waited > 1:
            self._say(
                f"training waited {waited:.0f} s at step {step} until the checkpoint before was written; "
                "a longer checkpoint.interval avoids it"
            )
        return None

    def _save(self, step: int, tensors: StateDict, contents: Contents, ranks: Ranks) -> bool:
        """Write, and remove what is no longer wanted; whether it worked, which a loud line says otherwise."""
        started = time.monotonic()
        try:
            folder = self._write(step, tensors, contents, ranks)
        except FailedOnSomeRank as error:
            self._give_up(step, error)
            return False
        self._last_saved_step = step
        self.latest = Saved(step, folder)
        self._remove_old(step)
        self.slowest_save = max(self.slowest_save, time.monotonic() - started)
        return True

    def _write(self, step: int, tensors: StateDict, contents: Contents, ranks: Ranks) -> Folder:
        """The four steps of the module's docstring. Raises FailedOnSomeRank on all ranks."""
        root, name = self._root, step_name(step)
        ranks.on_first(lambda: root.begin(name))
        own = write_tensors(root.writing(name), tensors, ranks.group)
        files = tuple(entry for entries in ranks.gather(own) for entry in entries)
        manifest = Manifest(step, contents, self._layout, ranks.size, files)
        ranks.on_first(lambda: self._publish(manifest))
        return root.folder(name)

    def _publish(self, manifest: Manifest) -> None:
        name = step_name(manifest.step)
        write_manifest(self._root.writing(name), manifest)
        self._root.publish(name)

    def _give_up(self, step: int, error: FailedOnSomeRank) -> None:
        """Remove what was written, which may be what filled the disk, and say so."""
        if self._last_saved_step == step:
            self._last_saved_step = None
        if self._ranks.rank != 0:
            return
        message = "CHECKPOINT NOT SAVED at step %d: %s. Training goes on; the latest valid checkpoint is %s"
        try:
            valid = [str(each.folder) for each in folders.list_checkpoints(self._root) if each.manifest]
            logger.error(message, step, error, valid[0] if valid else "none")
            self._root.discard(step_name(step))
        except Exception as trouble:  # a remote file system raises what it likes
            logger.error(message, step, error, f"not known: {describe(trouble)}")

    def _remove_old(self, step: int) -> None:
        if self._ranks.rank != 0:
            return
        try:
            for removed in folders.apply_retention(self._root, self._config.keep_latest_k, step):
                logger.debug("removed the checkpoint of step %d", removed)
        except Exception as error:  # a remote file system raises what it likes
            # Not worth a training run; what could not be removed is tried again at the next save.
            logger.warning("could not remove an old checkpoint: %s", describe(error))

    # Loading

    def _open_latest(self, before: int | None = None) -> _Opened | None:
        for found in self._listed():
            if before is not None and (found.step >= before or found.step == 0):
                continue
            if _is_export(found):
                self._say(f"{found.folder} holds only weights, to go on needs more; passed over")
                continue
            try:
                return self._open(found)
            except InvalidCheckpoint as error:
                self._say(f"CHECKPOINT PASSED OVER: {found.folder} is not valid: {error}")
        return None

    def _open_configured(self, step: int) -> _Opened:
        listed = self._listed()
        found = choose_step(self._root, step, listed)
        if _is_export(found):
            raise ConfigurationError(
                f"checkpoint.load_step = {step}: {found.folder} holds only weights, to go on needs more"
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
                f"checkpoint.load_step = {step}: {found.folder} is not valid: {error}"
            ) from error

    def _listed(self) -> list[folders.Found]:
        return self._ranks.on_first(lambda: folders.list_checkpoints(self._root))

    def _open(self, found: folders.Found) -> _Opened:
        """Verify a checkpoint, its files shared among the ranks. Raises InvalidCheckpoint on all ranks."""
        if found.manifest is None:
            raise InvalidCheckpoint(str(found.problem))
        problems: tuple[str, ...] = ()
        if self._config.verify == "full":
            own = found.manifest.files[self._ranks.rank :: self._ranks.size]
            problems = checksum_problems(found.folder, own)
        reader = None
        if not problems:
            try:
                reader = CheckpointReader(found.folder)
            except InvalidCheckpoint as error:
                problems = (str(error),)
        everywhere = [problem for of_rank in self._ranks.gather(problems) for problem in of_rank]
        if everywhere or reader is None:
            raise InvalidCheckpoint("; ".join(dict.fromkeys(everywhere)))
        return _Opened(found.folder, found.manifest, reader)

    def _restore(self, opened: _Opened, state: TrainState) -> int:
        try:
            return self._restore_all(opened, state)
        except FailedOnSomeRank as error:
            advice = (
                "; checkpoint.verify = 'full' passes over what is damaged"
                if self._config.verify != "full"
                else ""
            )
            raise FailedOnSomeRank(f"{opened.folder} cannot be loaded: {error}{advice}") from error

    def _restore_all(self, opened: _Opened, state: TrainState) -> int:
        if opened.manifest.contents is Contents.WEIGHTS:
            restore_weights(opened.reader, state.model_parts, self._ranks)
            return opened.manifest.step
        exclude = self._config.exclude_from_loading
        step = restore_full(opened.reader, state, self._ranks, exclude)
        if (opened.manifest.layout, opened.manifest.world_size) == (self._layout, self._ranks.size):
            restore_rng(opened.reader, self._ranks, self._device)
        else:
            self._say(
                f"{opened.folder} was saved by {opened.manifest.world_size} ranks ({opened.manifest.layout}): "
                "parameters, optimizer and data go on exactly; random generators start anew"
            )
        return step

    def _say(self, message: str) -> None:
        if self._ranks.rank == 0:
            logger.warning(message)


def _is_export(found: folders.Found) -> bool:
    """Whether it is the weights-only result of a run, rather than a seed (step 0) to start from."""
    return found.manifest is not None and found.manifest.contents is Contents.WEIGHTS and found.step != 0
