"""The loss without all logits against the loss of all logits: time and memory of output layer and loss, as ratios.

    python benchmarks/loss.py [--tokens 8192] [--dim 1024] [--vocabulary 32000] [--chunk 1024] [--dtype float32]

Each is run by processes of its own, forward and backward, several times in turns. Seconds are those of the processor. Memory is what the process's peak
grew by over what it had before the first forward. A second table has other chunks.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parallelisms.fused_loss import WeightGradient
from parallelisms.loss import TokenLosses

Step = Callable[[], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    print(
        f"{arguments.tokens} tokens, dim {arguments.dim}, vocabulary {arguments.vocabulary}, "
        f"{arguments.dtype}, {arguments.threads} thread(s)"
    )
    chunks = sorted({arguments.chunk // 4, arguments.chunk, arguments.chunk * 4})
    kinds: list[int | None] = [None, *chunks]
    runs: dict[int | None, list[tuple[float, int, float]]] = {kind: [] for kind in kinds}
    for _ in range(arguments.repeats):
        for kind in kinds:
            runs[kind].append(_in_a_process(arguments, kind))
    plain_seconds, plain_bytes = _middle(runs[None])
    print(f"{'':16}{'seconds':>10}{'ratio':>8}{'MiB':>10}{'ratio':>8}{'loss':>14}")
    for kind in kinds:
        seconds, size = _middle(runs[kind])
        name = "all logits" if kind is None else f"chunks of {kind}"
        loss = runs[kind][0][2]
        print(
            f"{name:16}{seconds:10.3f}{seconds / plain_seconds:8.2f}{size / 2**20:10.1f}"
            f"{size / plain_bytes:8.2f}{loss:14.8f}"
        )


def _middle(runs: list[tuple[float, int, float]]) -> tuple[float, float]:
    """Medians of time and memory."""
    return statistics.median(run[0] for run in runs), statistics.median(run[1] for run in runs)


def _in_a_process(arguments: argparse.Namespace, chunk: int | None) -> tuple[float, int, float]:
    """Seconds of a step, bytes by which the peak grew, and the loss; in a process that does nothing else."""
    context = multiprocessing.get_context("fork")
    results: Any = context.Queue()
    process = context.Process(target=_measure, args=(arguments, chunk, results))
    process.start()
    found: tuple[float, int, float] = results.get(timeout=600)
    process.join()
    return found


def _measure(arguments: argparse.Namespace, chunk: int | None, results: Any) -> None:
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, arguments.dtype)
    h = torch.randn(1, arguments.tokens, arguments.dim, dtype=dtype).requires_grad_()
    weight = (
        (torch.randn(arguments.vocabulary, arguments.dim) * arguments.dim**-0.5).to(dtype).requires_grad_()
    )
    labels = torch.randint(arguments.vocabulary, (1, arguments.tokens))
    losses = TokenLosses([labels], torch.tensor(float(arguments.tokens)), ignore=-100)
    accumulated = WeightGradient()

    def step() -> Tensor:
        h.grad = weight.grad = None
        if chunk is None:
            loss = losses(h @ weight.t(), 0)
        else:
            loss = losses.of_hidden(h, weight, 0, accumulated, chunk)
        loss.backward()
        return loss.detach()

    before = _peak()
    loss = step()
    grown = _peak() - before
    start = time.process_time()
    for _ in range(2):
        step()
    results.put(((time.process_time() - start) / 2, grown, float(loss)))


def _peak() -> int:
    """The most memory that this process has had so far, in bytes (Linux)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
