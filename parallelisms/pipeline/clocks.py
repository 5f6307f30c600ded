"""How far the clocks of two ranks are apart: an exchange of messages with rank 0.

Cristian's method (Probabilistic clock synchronization, Distributed Computing 3, 1989), as in NTP. A rank takes
the time, asks rank 0 for its time, and takes the time again. Rank 0 answered somewhere between; if in the
middle, the offset is known, and it is off by half of the round trip at most. Of several rounds the one with
the shortest round trip counts. Ranks on one host share the clock in fact; nothing relies on that.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from parallelisms.pipeline.assemble import ClockOffset

_ROUNDS = 16


def measure_offset(ranks: Sequence[int], group: dist.ProcessGroup | None = None) -> ClockOffset:
    """The offset of this rank's monotonic clock to that of `ranks[0]`. Collective over `ranks`.

    The ranks take turns: two at once would make each other's round trips longer. 16 rounds take about 2 ms.

    Args:
        ranks: global ranks, this one among them, in the same order on each.
        group: a process group that they belong to, with a backend for CPU tensors.
    """
    root = ranks[0]
    if dist.get_rank() == root:
        for other in ranks[1:]:
            _answer(other, group)
        return ClockOffset(0, 0, time.monotonic_ns())
    return _ask(root, group)


def _answer(other: int, group: dist.ProcessGroup | None) -> None:
    message = torch.zeros(1, dtype=torch.int64)
    for _ in range(_ROUNDS):
        dist.recv(message, other, group=group)
        message.fill_(time.monotonic_ns())
        dist.send(message, other, group=group)


def _ask(root: int, group: dist.ProcessGroup | None) -> ClockOffset:
    message = torch.zeros(1, dtype=torch.int64)
    shortest, offset = 0, 0
    for each in range(_ROUNDS):
        before = time.monotonic_ns()
        dist.send(message, root, group=group)
        dist.recv(message, root, group=group)
        after = time.monotonic_ns()
        if each == 0 or after - before < shortest:
            shortest = after - before
            offset = int(message) - (before + after) // 2
    return ClockOffset(offset, shortest // 2 + 1, after)
