"""Run a function on N ranks: forked gloo processes with a hard timeout, none of which outlives the call."""

from __future__ import annotations

import multiprocessing
import os
import queue
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch._dynamo  # else every forked rank that uses FSDP or an optimizer imports it itself, for seconds
import torch.distributed as dist

from trainer.ports import free_port


class RankError(AssertionError):
    """A rank raised, died, or did not end in time."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    process_group: bool = True,
) -> list[Any]:
    """Call `function(rank, *args)` on `world_size` gloo ranks and return the results by rank.

    The parent has torch imported and the children are forked, so 4 ranks start in 0.2 s. Results are pickled
    through a queue (return plain data or CPU tensors). Raises RankError with the first failing rank's
    traceback; kills whatever is left after `timeout` seconds. With `process_group=False` the function forms its
    own from the environment that a launcher would set.
    """
    context = multiprocessing.get_context("fork")
    results: Any = context.Queue()
    port = free_port()
    ranks = [
        context.Process(
            target=_rank_main,
            args=(function, rank, world_size, port, timeout if process_group else None, results, args),
            daemon=True,
        )
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    try:
        return _collect(ranks, results, timeout)
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
            process.join()


def _collect(ranks: list[Any], results: Any, timeout: float) -> list[Any]:
    deadline = time.monotonic() + timeout
    answers: dict[int, Any] = {}
    while len(answers) < len(ranks):
        try:
            rank, error, value = results.get(timeout=0.2)
        except queue.Empty:
            dead = [r for r, p in enumerate(ranks) if r not in answers and p.exitcode not in (None, 0)]
            if dead:
                raise RankError(
                    f"ranks {dead} died: exit codes {[ranks[r].exitcode for r in dead]}"
                ) from None
            if time.monotonic() > deadline:
                missing = sorted(set(range(len(ranks))) - set(answers))
                raise RankError(f"ranks {missing} did not end within {timeout} s") from None
            continue
        if error is not None:
            raise RankError(f"rank {rank} raised:\n{error}")
        answers[rank] = value
    return [answers[rank] for rank in range(len(ranks))]


def _rank_main(
    function: Any, rank: int, world_size: int, port: int, timeout: float | None, results: Any, args: Any
) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    error, value = None, None
    try:
        if timeout is not None:
            dist.init_process_group(
                "gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
            )
        value = function(rank, *args)
    except BaseException:
        error = traceback.format_exc()
    # Tensors travel by value: a file descriptor of a process that has ended cannot be opened.
    results.put((rank, error, _by_value(value)))
    results.close()
    results.join_thread()
    if error is None and dist.is_initialized():
        dist.destroy_process_group()
    os._exit(0 if error is None else 1)


def _by_value(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (
            value.detach().cpu().numpy().copy()
            if value.dtype != torch.bfloat16
            else value.float().numpy().copy()
        )
    if isinstance(value, dict):
        return {key: _by_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_by_value(item) for item in value)
    return value
