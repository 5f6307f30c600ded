"""A run on one rank: everything around the loop, in the order in which it happens."""

from __future__ import annotations

import logging
import os
import random
from pathlib import Path
from typing import TypedDict

import numpy as np
import torch
import torch.distributed as dist

from parallelisms.pipeline.timeline import TimelineRecorder
from trainer.build import build_pipeline
from trainer.checkpoint.agreement import Ranks
from trainer.checkpoint.filesystem import open_root
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.state import TrainState, restore_train_json, train_json
from trainer.checkpoint.weights import TrainedModel
from trainer.config.load import Loaded
from trainer.config.schema import Config
from trainer.data.build import build_loader, build_validation, training_sources
from trainer.data.errors import DataExhausted
from trainer.data.sources import TokenizedSource, open_source
from trainer.data.tokenizer import Tokenizer, load_tokenizer
from trainer.data.tokenizer_training import debug_tokenizer
from trainer.errors import ConfigurationError, StagelineError, StoppedOnRequest, TrainingFailed
from trainer.health import check_health, health_is_checked
from trainer.listeners import Checkpoints, Replicas, Timelines, Validation
from trainer.loop import Listener, Loop
from trainer.optimizer import build_lr_schedule, build_optimizer
from trainer.plan.plan import Plan
from trainer.process import RankProcess
from trainer.profiling import Profiler
from trainer.reporting import Reporter
from trainer.run_folder import RunFolder
from trainer.run_state import Phase
from trainer.stragglers import Stragglers
from trainer.time_limit import TimeLimit
from trainer.weights.exporting import export_trained
from trainer.weights.initial import load_initial

logger = logging.getLogger(__name__)


_SLOW_DISK = 50e6  # bytes per second and rank


class Run:
    """One rank's share of a job. Every method is collective over all ranks."""

    def __init__(self, loaded: Loaded, plan: Plan, process: RankProcess, folder: RunFolder) -> None:
        """Build everything; nothing is trained or loaded yet."""
        self._config = config = loaded.config
        self._plan = plan
        self._folder = folder
        self._process = process
        self._reporter = Reporter(loaded, plan, process, folder)
        _seed_everything(config)
        tokenizer = _get_tokenizer(config, plan, process, folder)
        process.progress.phase("building the model", patient=True)
        recorder = TimelineRecorder(process.progress, process.device)
        self._pipeline = build_pipeline(config, plan, process, recorder)
        device = torch.device("cpu") if config.training.enable_cpu_offload else process.device
        optimizer = build_optimizer(self._pipeline.parts, config.optimizer, device)
        schedule = build_lr_schedule(optimizer, config)
        self._loader = build_loader(config, tokenizer, **_data_rank(plan, process))
        limit = TimeLimit(config.job.time_limit, _seconds_of_a_save(plan))
        self._loop = Loop(
            config,
            plan,
            self._pipeline,
            optimizer,
            schedule,
            self._loader,
            process.device,
            process.progress,
            process.stop,
            limit,
        )
        self._loop.roll_back = self._roll_back
        self._state = TrainState(self._pipeline.parts, optimizer, schedule, self._loader, self._loop.counters)
        self._checkpoints = CheckpointManager(
            open_root(folder.path, config.checkpoint.folder),
            config.checkpoint,
            layout=str(plan.layout.dimensions),
            device=process.device,
        )
        self._saving = Checkpoints(
            self._checkpoints, self._state, config.training.steps, process.progress, limit
        )
        self._profiler = Profiler(config.profiling, folder.path, process.rank, process.device)
        self._timelines = Timelines(config.profiling, recorder, plan, folder.path, process.progress)
        self._stragglers = Stragglers(config, recorder, process)
        self._reporter.figures_of_ranks = lambda: self._stragglers.figures
        self._replicas = Replicas(config.comm.check_replicas_every, self._pipeline, optimizer, process)
        self._validation = self._build_validation(plan, tokenizer)
        self._completed = True

    def resume(self) -> None:
        """Go on from the latest valid checkpoint; if there is none, start from the configured weights, if any."""
        self._process.progress.phase("loading a checkpoint", collective=True, patient=True)
        step, table = self._checkpoints.load(self._state), self._config.checkpoint
        if step is None and table.initial_load_path is not None:
            step = load_initial(
                self._config,
                self._plan.sizes,
                self._state,
                Ranks(),
                lambda line: self._reporter.say(f"{'weights':12}{line}"),
            )
        self._loop.step = step or 0
        self._reporter.begin(self._loop.step, lambda: self._loader.counts)

    def train(self) -> None:
        """Train until the last step, or the end of the data."""
        if self._config.checkpoint.create_seed_checkpoint:
            path = self._checkpoints.save_seed(self._state)
            self._reporter.say(f"initial parameters saved in {path}; nothing was trained")
            return
        listeners: list[Listener] = [self._timelines, self._stragglers, self._reporter, self._profiler]
        if self._validation is not None:
            listeners.append(self._validation)
        self._check_health()
        self._process.stop.note_only()
        try:
            self._completed = self._loop.run([*listeners, self._replicas, self._saving])
        except TrainingFailed:
            # On all ranks after the same step: a checkpoint that is being written is one to look into.
            self._checkpoints.complete()
            raise
        except DataExhausted as end:
            if self._loop.step == 0:
                raise
            # On all ranks before the same step, so this is the end of training as much as the last step is.
            self._reporter.say(f"{'data':12}{end}")
            self._saving.save_last(self._loop.step)
        if self._completed and self._config.checkpoint.last_save_in_hf:
            self._export()

    def finish(self) -> None:
        """Say how it went; close what is open. Raises StoppedOnRequest if the run was asked to stop."""
        self._process.progress.phase("finishing", patient=True)
        self._profiler.close()
        self._loader.close()
        step = self._loop.step
        if self._process.rank == 0:
            self._folder.ended(Phase.FINISHED if self._completed else Phase.STOPPED, step)
        latest = self._checkpoints.latest
        folder = None if latest is None else latest.folder
        if self._completed:
            self._reporter.finish(f"{'done':12}{step} steps", folder)
            return
        timely = self._loop.out_of_time and not self._process.stop.asked
        who = "job.time_limit" if timely else self._process.stop.name
        reason = f"by {who} after step {step} of {self._config.training.steps}"
        saves, saved = self._config.checkpoint.enable_checkpoint, latest is not None and latest.step == step
        how = "the same command goes on from there"
        if not saves:
            how = "checkpoint.enable_checkpoint is false"
        elif not saved:
            how = "its state could not be saved"
        self._reporter.finish(f"{'stopped':12}{reason}; {how}", folder)
        if saves and not saved:
            raise StagelineError(f"stopped {reason}, but the state of this step could not be saved")
        raise StoppedOnRequest(f"stopped {reason}")

    def _roll_back(self) -> int:
        """Parameters and optimizer of the latest valid checkpoint, all else as it is; returns the checkpoint's step.

        Raises:
            TrainingFailed: there is none.
        """
        goes_on = train_json(self._state, self._loop.step)
        step = self._checkpoints.go_back(self._state, self._loop.step)
        if step is None:
            raise TrainingFailed("there is no checkpoint yet to go back to")
        restore_train_json(self._state, goes_on)
        return step

    def _check_health(self) -> None:
        table, process = self._config.comm, self._process
        if health_is_checked(table.health_check, process.device):
            process.progress.phase("checking the health of ranks", collective=True, patient=True)
            for sentence in check_health(process.device, table.slow_rank_policy):
                self._reporter.say(f"{'health':12}{sentence}")

    def _export(self) -> None:
        """Write the last checkpoint's weights as a Hugging Face folder; one rank does, reading what all saved."""
        step, saved = self._loop.step, self._checkpoints.latest
        if saved is None or saved.step != step:
            return  # nothing was trained, or it could not be saved, which has been said
        self._process.progress.phase("exporting the weights", collective=True, patient=True)
        trained = TrainedModel(self._folder.path, self._config, saved.folder, step, ())
        target = self._folder.path / "huggingface" / f"step-{step}"
        Ranks().on_first(lambda: export_trained(trained, target, self._config.checkpoint.export_dtype))
        self._reporter.say(f"{'exported':12}{target}")

    def _build_validation(self, plan: Plan, tokenizer: Tokenizer) -> Validation | None:
        if plan.validation is None:
            return None
        return Validation(
            self._config.validation,
            plan.validation,
            self._pipeline,
            build_validation(self._config, tokenizer, **_data_rank(plan, self._process)),
            self._process,
            self._reporter,
            last_step=self._config.training.steps,
        )


class _DataRank(TypedDict):
    data_rank: int
    data_ranks: int
    device: torch.device


def _data_rank(plan: Plan, process: RankProcess) -> _DataRank:
    layout = plan.layout
    return {
        "data_rank": layout.data_rank(process.rank),
        "data_ranks": layout.data_ranks,
        "device": process.device,
    }


def _get_tokenizer(config: Config, plan: Plan, process: RankProcess, folder: RunFolder) -> Tokenizer:
    """The configured tokenizer, or that of the token store, or the one that the first run in this folder trains on its
    corpus.

    Raises ConfigurationError if it has more tokens than the model.
    """
    path: str | Path | None = config.model.tokenizer_path
    if path is None:
        process.progress.phase("preparing the tokenizer", collective=process.rank != 0, patient=True)
        if process.rank == 0:
            first = training_sources(config)[0]
            source = open_source(first.dataset, first.dataset_path, first.text_column)
            if isinstance(source, TokenizedSource):
                source.save_tokenizer(folder.tokenizer)
            else:
                debug_tokenizer(folder.tokenizer, plan.sizes.vocab_size, source)
        dist.barrier()
        path = folder.tokenizer
    tokenizer = load_tokenizer(path)
    if tokenizer.vocab_size > plan.sizes.vocab_size:
        raise ConfigurationError(
            f"model.tokenizer_path = {str(path)!r}: the tokenizer has {tokenizer.vocab_size} tokens, the model "
            f"only {plan.sizes.vocab_size}; set model.override.vocab_size to {tokenizer.vocab_size} or more"
        )
    return tokenizer


def _seconds_of_a_save(plan: Plan) -> float:
    """Of the rank with most to write, before any save was measured."""
    return max(state.parameters + state.optimizer for state in plan.bytes_of_rank) / _SLOW_DISK


def _seed_everything(config: Config) -> None:
    """Global generators, for code that draws without being asked; the model's parameters do not use them."""
    seed = config.training.seed
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if config.training.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        if torch.cuda.is_available() and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
            raise ConfigurationError(
                "training.deterministic = true needs CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment on CUDA"
            )
