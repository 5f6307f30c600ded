"""The whole program, train.py, on forked ranks, which start without an import; and what it wrote."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed.fsdp

import train
import trainer.run  # noqa: F401  (this and torch's parts: else each forked rank imports them, for seconds)
from tests.distributed.training_run import write_corpus
from trainer.ports import free_port

# What may differ between two runs of the same training.
TIMES = frozenset(
    {
        "tokens_per_second",
        "step_seconds",
        "data_seconds",
        "mfu",
        "memory_bytes",
        "compute_seconds_median",
        "compute_seconds_max",
        "slowest_rank",
    }
)

_TINY = (
    "--model.tokenizer_path byte --model.override.dim 32 --model.override.n_layers 4 --model.override.n_heads 4 "
    "--model.override.n_kv_heads 2 --model.override.ffn_hidden 48 --model.override.vocab_size 258 "
    "--training.dataset text --training.batch_size 4 --training.seq_len 32 --training.warmup_steps 2 "
    "--metrics.log_freq 1 --checkpoint.keep_latest_k 0"
)

Before = Callable[[int], None]  # called on each forked rank (its number) before the program


def tiny(folder: Path, *more: str, steps: int = 4) -> list[str]:
    """Arguments of a run in `folder` of a model of 48,000 parameters on a small text, every step logged."""
    folder.mkdir(parents=True, exist_ok=True)
    corpus = folder / "corpus.txt"
    if not corpus.exists():
        write_corpus(folder)
    end = f"--training.dataset_path {corpus} --training.steps {steps} --job.dump_folder {folder}".split()
    return [*_TINY.split(), *end, *" ".join(more).split()]


def pipeline(degree: int, schedule: str = "1F1B", microbatches: int | None = None) -> str:
    """Arguments of a pipeline."""
    pp = "--experimental.pipeline_parallel"
    count = "" if microbatches is None else f"{pp}_microbatches {microbatches}"
    return f"{pp}_degree {degree} {pp}_schedule {schedule} {count}"


def rows(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on time."""
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{key: value for key, value in row.items() if key not in TIMES} for row in lines]


def values(folder: Path, key: str) -> list[Any]:
    """A key of the rows that have it."""
    return [row[key] for row in rows(folder) if key in row]


@dataclass(frozen=True)
class Forked:
    """train.py on forked ranks. Standard output and error go to the file `said`."""

    ranks: Sequence[Any]
    said_in: Path

    @classmethod
    def start(cls, arguments: Sequence[str], world_size: int, before: Before | None = None) -> Forked:
        context = multiprocessing.get_context("fork")
        said = Path(arguments[arguments.index("--job.dump_folder") + 1]) / "said"
        port = free_port()
        ranks = [
            context.Process(target=_rank, args=(rank, world_size, port, list(arguments), str(said), before))
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        return cls(ranks, said)

    def wait(self, timeout: float = 60.0) -> list[int]:
        """The exit code of each rank, once all have ended; TimeoutError, and none is left, if they do not."""
        deadline = time.monotonic() + timeout
        try:
            for process in self.ranks:
                process.join(max(0.0, deadline - time.monotonic()))
            if any(process.is_alive() for process in self.ranks):
                raise TimeoutError(f"ranks still run after {timeout} s:\n{self.said}")
            return [process.exitcode for process in self.ranks]
        finally:
            self.kill()

    def kill(self, number: int = signal.SIGKILL) -> None:
        """A signal to each rank that still runs."""
        for process in self.ranks:
            if process.is_alive():
                os.kill(process.pid, number)

    @property
    def said(self) -> str:
        return self.said_in.read_text() if self.said_in.exists() else ""


def run(arguments: Sequence[str], world_size: int = 1, before: Before | None = None) -> str:
    """Run to the end, which must be a good one; returns what was said."""
    job = Forked.start(arguments, world_size, before)
    codes = job.wait()
    assert codes == [0] * world_size, (codes, job.said)
    return job.said


def _rank(
    rank: int, world_size: int, port: int, arguments: list[str], said: str, before: Before | None
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOG_RANK="0")
    descriptor = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = (
        os.fdopen(1, "w", buffering=1, closefd=False),
        os.fdopen(2, "w", buffering=1, closefd=False),
    )
    if before is not None:
        before(rank)
    code = train.main(arguments)
    os._exit(code)
