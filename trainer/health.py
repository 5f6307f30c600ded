"""A look at all ranks before the first step: device, connection and clock; a rank that falls behind is named.

Everything is measured for a fixed short time or a fixed number of bytes, on all ranks at once: a few seconds in all.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from parallelisms.pipeline.clocks import measure_offset
from trainer.errors import RankFailed

_DEVICE_SECONDS = 0.1  # of multiplying matrices
_RING_BYTES = 4 << 20
_ROUNDS = 4
_SLOW = 0.6  # of the median: slower ranks are named
_SKEW = 1.0  # seconds between clocks: log files of several hosts are not in order any more
_CLOCKS = 256  # ranks whose clocks are compared: it takes them 2 ms each, one after another


@dataclass(frozen=True)
class RankHealth:
    """What was measured of a rank.

    Attributes:
        host: where it is.
        flops: operations in a second of float32 (CPU) or bfloat16 matrix products.
        bandwidth: bytes in a second to the next rank and from the one before, at the same time.
        latency: seconds of an all-reduce of one number.
        skew: seconds by which its clock is ahead of rank 0's; None if it was not compared.
    """

    host: str
    flops: float
    bandwidth: float
    latency: float
    skew: float | None


def health_is_checked(when: str, device: torch.device) -> bool:
    """Whether this job is to be looked at: `when` is comm.health_check."""
    world_size = dist.get_world_size()
    several_hosts = int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) < world_size
    return world_size > 1 and (
        when == "always" or (when == "auto" and (several_hosts or device.type == "cuda"))
    )


def check_health(device: torch.device, policy: str) -> list[str]:
    """Measure, compare, and return what is to be said, in sentences; collective. Raises RankFailed on all ranks if a
    rank is slow and the policy is "stop"."""
    own = RankHealth(
        socket.gethostname(),
        _device_speed(device),
        _ring_bandwidth(device),
        _latency(device),
        _clock_skew(),
    )
    everyone: list[RankHealth] = [own] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    slow = slow_ranks(everyone)
    if slow and policy == "stop":
        raise RankFailed("; ".join(slow) + "; comm.slow_rank_policy = 'stop'")
    return [_outline(everyone), *(f"WARNING: {sentence}" for sentence in slow)]


def slow_ranks(everyone: Sequence[RankHealth]) -> list[str]:
    """A sentence for each rank that is far behind the median of all in something, or whose clock is wrong.

    A slow connection shows at both its ends; the rank that is named may be the neighbour of the one to blame.
    """
    found = []
    for what, values in (
        ("its device", [each.flops for each in everyone]),
        ("its connection to its neighbours", [each.bandwidth for each in everyone]),
    ):
        median = statistics.median(values)
        found += [
            f"rank {rank} on {everyone[rank].host} is slow: {what} reaches {value / median:.0%} of the median rank's speed"
            for rank, value in enumerate(values)
            if value < _SLOW * median
        ]
    return found + [
        f"the clock of {each.host} (rank {rank}) is {abs(each.skew):.1f} s {'ahead of' if each.skew > 0 else 'behind'} rank 0's"
        for rank, each in enumerate(everyone)
        if each.skew is not None and abs(each.skew) > _SKEW
    ]


def _outline(everyone: Sequence[RankHealth]) -> str:
    flops, bandwidth = [each.flops for each in everyone], [each.bandwidth for each in everyone]
    skew = max(abs(each.skew) for each in everyone if each.skew is not None)
    return (
        f"{len(everyone)} ranks on {len({each.host for each in everyone})} hosts: "
        f"devices {min(flops) / 1e12:.3g} to {max(flops) / 1e12:.3g} TFLOP/s, "
        f"neighbours {min(bandwidth) / 1e9:.3g} to {max(bandwidth) / 1e9:.3g} GB/s, "
        f"all-reduce {max(each.latency for each in everyone) * 1e3:.2g} ms, clocks within {skew * 1e3:.2g} ms"
    )


def _device_speed(device: torch.device) -> float:
    on_gpu = device.type == "cuda"
    size, dtype = (4096, torch.bfloat16) if on_gpu else (256, torch.float32)
    matrix = torch.full((size, size), 0.01, dtype=dtype, device=device)
    matrix @ matrix  # loads what is loaded at first use
    _wait(device)
    end, best = time.perf_counter() + _DEVICE_SECONDS, float("inf")
    while (start := time.perf_counter()) < end:
        matrix @ matrix
        _wait(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def _ring_bandwidth(device: torch.device) -> float:
    """Every rank sends to the next and receives from the one before, at once; the best round counts."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    out = torch.zeros(_RING_BYTES, dtype=torch.uint8, device=device)
    into = torch.empty_like(out)
    best = float("inf")
    for _ in range(_ROUNDS):
        dist.barrier()
        start = time.perf_counter()
        work = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, out, (rank + 1) % world_size),
                dist.P2POp(dist.irecv, into, (rank - 1) % world_size),
            ]
        )
        for each in work:
            each.wait()
        _wait(device)
        best = min(best, time.perf_counter() - start)
    return _RING_BYTES / best


def _latency(device: torch.device) -> float:
    number = torch.zeros(1, device=device)
    best = float("inf")
    for _ in range(4 * _ROUNDS):
        start = time.perf_counter()
        dist.all_reduce(number)
        _wait(device)
        best = min(best, time.perf_counter() - start)
    return best


def _clock_skew() -> float | None:
    """Of the wall clock, from the offset of the monotonic clocks and what each host adds to its own."""
    ranks = range(min(_CLOCKS, dist.get_world_size()))
    added = time.time_ns() - time.monotonic_ns()
    of_rank_0 = torch.tensor([added])
    dist.broadcast(of_rank_0, 0)
    if dist.get_rank() not in ranks:
        return None
    offset = measure_offset(ranks).offset_ns
    return (added - offset - int(of_rank_0)) / 1e9


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
