"""Whatever goes wrong on one rank, all ranks end soon, with exit code 4, and the first cause is said once."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.training_run import configuration, write_corpus
from trainer.build import build_pipeline
from trainer.config.schema import Config
from trainer.data.build import build_loader
from trainer.data.tokenizer import load_tokenizer
from trainer.errors import ExitCode, TrainingFailed
from trainer.loop import Loop
from trainer.optimizer import build_lr_schedule, build_optimizer
from trainer.plan.plan import make_plan
from trainer.ports import free_port
from trainer.process import RankIdentity, RankProcess

RANKS = 4
Sabotage = Callable[[int, Loop, Any], None]  # rank, loop, pipeline: called before the first step


@dataclass(frozen=True)
class Ending:
    """How a job ended: exit code of each rank (-9: killed), everything written to stderr, seconds."""

    codes: list[int | None]
    said: str
    seconds: float


def raise_error(*_: Any) -> None:
    raise RuntimeError("sabotaged")


def in_forward(rank: int, loop: Loop, pipeline: Any) -> None:
    if rank == 2:
        pipeline.parts[0].register_forward_pre_hook(raise_error)


def in_backward(rank: int, loop: Loop, pipeline: Any) -> None:
    if rank == 1:
        weight = next(pipeline.parts[0].parameters())
        weight.register_hook(raise_error)


def in_loss(rank: int, loop: Loop, pipeline: Any) -> None:
    if rank == RANKS - 1:
        pipeline.parts[0].register_forward_hook(lambda *_: torch.zeros(1))  # no logits: the loss raises


def dies(rank: int, loop: Loop, pipeline: Any) -> None:
    if rank == 2:
        pipeline.parts[0].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))


def sleeps_for_ever(rank: int, loop: Loop, pipeline: Any) -> None:
    if rank == 1:
        pipeline.parts[0].register_forward_pre_hook(lambda *_: time.sleep(1000))


def sleeps_before_the_sum_of_tied_gradients(rank: int, loop: Loop, pipeline: Any) -> None:
    if rank == 0:
        pipeline.tied.sum_gradients = lambda: time.sleep(1000)


def ends_training(rank: int, loop: Loop, pipeline: Any) -> None:
    raise TrainingFailed("the loss is no number")


def _rank(rank: int, port: int, folder: str, config: Config, sabotage: Sabotage) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    log = os.open(f"{folder}/stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, sys.stderr.fileno())
    sys.stderr = os.fdopen(log, "w", buffering=1)
    plan = make_plan(config, RANKS)
    record = Path(folder) / "failure.json"
    with RankProcess(RankIdentity(rank, rank, RANKS), config, plan, record) as process:
        pipeline = build_pipeline(config, plan, process, process.progress)
        optimizer = build_optimizer(pipeline.parts, config.optimizer, process.device)
        loader = build_loader(config, load_tokenizer("byte"), data_rank=0, data_ranks=1)
        schedule = build_lr_schedule(optimizer, config)
        loop = Loop(config, plan, pipeline, optimizer, schedule, loader, process.device, process.progress)
        loop.train_step()
        sabotage(rank, loop, pipeline)
        loop.train_step()
    os._exit(0)


def end_of(folder: Path, configs: Callable[[int], Config], sabotage: Sabotage) -> Ending:
    """Run the sabotaged job and wait for every rank, at most 60 s."""
    context = multiprocessing.get_context("fork")
    port, start = free_port(), time.monotonic()
    ranks = [
        context.Process(target=_rank, args=(rank, port, str(folder), configs(rank), sabotage))
        for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(max(0.0, start + 60 - time.monotonic()))
        codes = [process.exitcode for process in ranks]
        return Ending(codes, (folder / "stderr").read_text(), time.monotonic() - start)
    finally:
        for process in ranks:
            process.kill()


def pipeline_config(folder: Path, **tables: Any) -> Config:
    experimental = {"pipeline_parallel_degree": RANKS, "pipeline_parallel_microbatches": 4}
    comm = {"train_timeout_seconds": 3, "init_timeout_seconds": 20}
    return configuration(write_corpus(folder), {"experimental": experimental, "comm": comm, **tables})


@pytest.mark.parametrize(
    ("sabotage", "rank", "words"),
    [
        (in_forward, 2, "raised RuntimeError: sabotaged (step 2, 2F0"),
        (in_backward, 1, "raised RuntimeError: sabotaged (step 2, 1B0"),
        (in_loss, 3, "(step 2, 3F0"),
    ],
)
def test_a_rank_that_raises_ends_all_and_is_named_with_its_action(
    tmp_path: Path, sabotage: Sabotage, rank: int, words: str
) -> None:
    ending = end_of(tmp_path, lambda _: pipeline_config(tmp_path), sabotage)
    assert ending.codes == [ExitCode.RANK_FAILED] * RANKS, ending
    last = ending.said.strip().splitlines()[-1]
    assert f"rank {rank} " in last, ending.said
    assert words in last, ending.said
    assert ending.said.count("stageline: rank") == 1, ending.said
    assert "Traceback" in ending.said


def test_a_rank_killed_by_signal_9_ends_all(tmp_path: Path) -> None:
    ending = end_of(tmp_path, lambda _: pipeline_config(tmp_path), dies)
    assert ending.codes[2] == -signal.SIGKILL
    assert [code for rank, code in enumerate(ending.codes) if rank != 2] == [ExitCode.RANK_FAILED] * 3, ending
    assert ending.said.count("stageline: rank") == 1, ending.said
    last = ending.said.strip().splitlines()[-1]
    assert last.startswith("stageline: rank 2 died: rank "), ending.said


def test_a_rank_that_sleeps_for_ever_is_named_with_its_stack_and_not_those_that_wait(tmp_path: Path) -> None:
    few = {"train_timeout_seconds": 3, "trace_buf_size": 3}
    ending = end_of(tmp_path, lambda _: pipeline_config(tmp_path, comm=few), sleeps_for_ever)
    assert ending.codes == [ExitCode.RANK_FAILED] * RANKS, ending
    last = ending.said.strip().splitlines()[-1]
    assert "rank 1 made no progress" in last, ending.said
    assert "1F0" in last
    assert "time.sleep" in ending.said, "the stack shows where the rank stands"
    assert ending.said.count("stageline: rank") == 1, ending.said
    # The last collectives of every rank are kept: as many as comm.trace_buf_size says.
    by_rank = recorded(tmp_path)
    assert sorted(by_rank) == [f"flight_recorder_rank_{rank}.json" for rank in range(RANKS)]
    for written in by_rank.values():
        entries = written["gloo"]["entries"]
        assert 0 < len(entries) <= 3
        assert {entry["profiling_name"] for entry in entries} <= {"gloo:all_reduce", "gloo:all_gather"}


@pytest.mark.slow
def test_a_hang_in_the_sum_of_tied_gradients_is_named_with_both_ranks(tmp_path: Path) -> None:
    tied = {"override": {"tie_embeddings": True}}
    ending = end_of(
        tmp_path,
        lambda _: pipeline_config(tmp_path, model=tied),
        sleeps_before_the_sum_of_tied_gradients,
    )
    assert ending.codes == [ExitCode.RANK_FAILED] * RANKS, ending
    last = ending.said.strip().splitlines()[-1]
    for rank, peer in ((0, 3), (3, 0)):
        waits = f"rank {rank} in summing the gradients of tied embeddings waits for the same with rank {peer}"
        assert waits in last, ending.said


def test_ranks_with_different_configurations_end_with_which_ranks_and_in_what(tmp_path: Path) -> None:
    def config(rank: int) -> Config:
        seq_len = 8 if rank == 3 else 16
        return pipeline_config(tmp_path, training={"seq_len": seq_len})

    ending = end_of(tmp_path, config, raise_error)
    assert ending.codes == [ExitCode.WRONG_CONFIGURATION] * RANKS, ending
    assert "ranks 3 were started with another configuration" in ending.said
    assert "batch" in ending.said


def test_an_error_that_all_ranks_share_is_said_once_without_a_traceback(tmp_path: Path) -> None:
    ending = end_of(tmp_path, lambda _: pipeline_config(tmp_path), ends_training)
    assert ending.codes == [ExitCode.TRAINING_FAILED] * RANKS, ending
    assert ending.said.strip() == "the loss is no number"
    assert recorded(tmp_path) == {}, "nothing to do with collectives"


def recorded(folder: Path) -> dict[str, Any]:
    """What the flight recorders of the ranks wrote, by file name."""
    return {path.name: json.loads(path.read_text()) for path in (folder / "logs").glob("flight_recorder_*")}
