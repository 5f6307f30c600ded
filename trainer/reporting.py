"""Reports a run: to the person at the terminal, to metrics.jsonl, TensorBoard and Weights & Biases."""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping
from typing import Any

import torch

from trainer.checkpoint.filesystem import Folder
from trainer.config.load import Loaded
from trainer.console import Console, shown_ranks
from trainer.data.loader import DataCounts
from trainer.flops import peak_flops
from trainer.loop import StepResult
from trainer.metrics import MetricsFile
from trainer.plan.plan import Plan
from trainer.plan.render import summary
from trainer.process import RankProcess
from trainer.run_folder import RunFolder
from trainer.tracking import Tracker, open_trackers
from trainer.validation import LossSum


class Reporter:
    """A listener of the loop. Rank 0 writes the files; the ranks in LOG_RANK speak."""

    def __init__(self, loaded: Loaded, plan: Plan, process: RankProcess, folder: RunFolder) -> None:
        """Write the run folder's descriptions and say what is about to be trained."""
        self._config = loaded.config
        self._name = loaded.name
        self._plan = plan
        self._folder = folder
        self._device = process.device
        self._rank = process.rank
        self._writes = process.rank == 0
        self._peak = peak_flops(process.device, loaded.config.training.mixed_precision_param)
        silent = process.rank not in shown_ranks()
        self._console = Console(silent=silent, plain=loaded.config.metrics.disable_color_printing)
        process.before_last_words(self._console.stop_progress)
        self._metrics: MetricsFile | None = None
        self._data: Callable[[], DataCounts] | None = None
        self.figures_of_ranks: Callable[[], Mapping[str, float]] = dict
        self._trackers: list[Tracker] = []
        self._since_last_log: list[StepResult] = []
        if self._writes:
            folder.describe(loaded, plan)
        self._say_what_is_trained(loaded)

    def say(self, line: str) -> None:
        self._console.say(line)

    def begin(self, step: int, data: Callable[[], DataCounts]) -> None:
        """The run goes on after `step` (0: from the start); `data` counts what it has read."""
        self._data = data
        if self._writes:
            self._metrics = MetricsFile(self._folder.path, step)
        if self._writes or not self._config.metrics.rank_0_only:
            self._trackers = open_trackers(self._config, self._folder.path, self._name, step, self._rank)
        if step:
            self.say(f"{'resumed':12}after step {step}")
        self._console.start_progress(step, self._config.training.steps)

    def before_step(self, step: int) -> None: ...

    def after_step(self, result: StepResult) -> None:
        """Log the step if it is its turn."""
        self._since_last_log.append(result)
        speed = self._plan.tokens_per_step / result.seconds
        self._console.advance(result.step, f"loss {result.loss:.4f}  {speed:,.0f} tokens/s")
        unusual = result.skipped or result.spike
        if result.step % self._config.metrics.log_freq == 0 or result.step == 1 or unusual:
            self._log(result)
            self._since_last_log.clear()

    def validated(self, step: int, losses: Mapping[str, LossSum]) -> None:
        """Log the loss on each validation set; with several, each by its name, too."""
        whole = LossSum(
            sum(each.total for each in losses.values()), sum(each.tokens for each in losses.values())
        )
        by_name = {name: each.mean for name, each in losses.items()} if len(losses) > 1 else {}
        named = {f"validation_loss/{name}": loss for name, loss in by_name.items()}
        self._write({"step": step, "validation_loss": whole.mean, **named})
        sets = "".join(f"  {name} {loss:.4f}" for name, loss in by_name.items())
        self.say(f"step {step:6}  validation loss {whole.mean:.4f}{sets}")

    def finish(self, how: str, checkpoint: Folder | None) -> None:
        """Close everything; say how the run ended and where the results are, the last checkpoint among them."""
        self._console.stop_progress()
        if self._metrics is not None:
            self._metrics.close()
        for tracker in self._trackers:
            tracker.close()
        self.say(how)
        self.say(f"{'metrics':12}{self._folder.path / 'metrics.jsonl'}")
        if checkpoint is not None:
            self.say(f"{'checkpoint':12}{checkpoint}")
            self.say(f"{'try it':12}stageline generate --checkpoint {self._folder.path} --prompt 'The '")

    def _say_what_is_trained(self, loaded: Loaded) -> None:
        for notice in loaded.notices:
            self.say(notice)
        training = self._config.training
        data = training.dataset + (f" {training.dataset_path}" if training.dataset_path else "")
        if sources := self._config.data.sources:
            data = ", ".join(f"{each.name} {each.weight:g}" for each in sources)
        self._console.say_all(
            [
                *summary(self._plan),
                ("data", data),
                ("device", _device_name(self._device)),
                ("output", str(self._folder.path)),
            ]
        )

    def _log(self, result: StepResult) -> None:
        """A row with times averaged over the steps since the last one, where a single step would mislead."""
        steps = len(self._since_last_log)
        seconds = sum(each.seconds for each in self._since_last_log) / steps
        data_seconds = sum(each.data_seconds for each in self._since_last_log) / steps
        tokens_per_second = self._plan.tokens_per_step / seconds
        ranks = self._plan.layout.world_size
        flops = self._plan.flops_per_token * tokens_per_second / ranks
        self._write(
            {
                "step": result.step,
                "loss": result.loss,
                "grad_norm": result.grad_norm,
                "lr": result.lr,
                "tokens": result.tokens,
                "tokens_per_second": tokens_per_second,
                "step_seconds": seconds,
                "data_seconds": data_seconds,
                "mfu": None if self._peak is None else flops / self._peak,
                "memory_bytes": _memory_bytes(self._device),
                "skipped": result.skipped,
                **({"spike": result.spike} if self._config.training.loss_spike_threshold else {}),
                **({"rolled_back_to": result.rolled_back_to} if result.rolled_back_to is not None else {}),
                **_expert_load(result),
                **self.figures_of_ranks(),
                **self._read(),
            }
        )
        if not self._console.live:
            self.say(
                f"step {result.step:6}  loss {result.loss:8.4f}  grad norm {result.grad_norm:8.4f}  "
                f"lr {result.lr:.2e}  {tokens_per_second:10,.0f} tokens/s"
            )

    def _read(self) -> dict[str, float]:
        """What was read of the data since the start of training, on all ranks together."""
        if self._data is None:
            return {}
        counts = self._data()
        by_source = counts.tokens if len(counts.tokens) > 1 else {}
        return {
            **{f"tokens/{name}": tokens for name, tokens in by_source.items()},
            "packing_efficiency": counts.packing_efficiency,
            "bad_documents": counts.bad_documents,
        }

    def _write(self, row: dict[str, Any]) -> None:
        if self._metrics is not None:
            self._metrics.write(row)
        values = {key: float(value) for key, value in row.items() if key != "step" and value is not None}
        for tracker in self._trackers:
            tracker.log(row["step"], values)


def _expert_load(result: StepResult) -> dict[str, float]:
    """Tokens of the busiest expert over the mean: the mean over the layers, and of the worst layer."""
    if result.expert_counts is None:
        return {}
    load = result.expert_counts.load()
    return {"expert_load_mean": load.mean, "expert_load_worst": load.worst}


def _memory_bytes(device: torch.device) -> int:
    """Peak of the device's allocated memory, or of the process's resident memory on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads in each process"
