"""DualPipeV: DualPipe cut in half. Two stages per rank on a V, forwards of one paired with backwards of the other.

2 ranks (rank 0 has stages 0 and 3, rank 1 has 1 and 2), 4 microbatches; B is the whole
backward, twice as long:

    rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1~~~~ 3F2 0B0~~~~ 3B2~~~~ 3F3     0B1~~~~ 3B3~~~~ 0I2 0W2 0I3 0W3
    rank 1 |     1F0 2F0 1F1 2F1 1F2 2B0~~~~ 2F2 1B0~~~~ 1F3 2B1~~~~ 2F3 1B1~~~~ 2B2~~~~ 1B2~~~~ 2I3 1I3 2W3 1W3

The eight steps of each rank are those of the published algorithm and are named in the code. In its main step
every forward of one stage stands beside a backward of the other: kernels that run the two at once can hide
all their communication. Here they run one after the other. The backward is split only where a W fills a gap:
in the warm-up and in the second half of the drain. At most p + 1/2 microbatches are held.

The published algorithm needs m >= 2p. For fewer, its lists are made for 2p, the microbatches that do not
exist are left out, which keeps them free of deadlock, and the holes are closed up.

DeepSeek-AI, DualPipe, `dualpipev.py` (2025), after Sea AI Lab's "cut-in-half" of DualPipe (DeepSeek-V3
Technical Report, 2024, arXiv 2412.19437, section 3.2.1).
"""

from __future__ import annotations

from collections import deque

from parallelisms.pipeline.actions import Action, ActionLists
from parallelisms.pipeline.schedules.family import ScheduleFamily
from parallelisms.pipeline.schedules.justification import close_up
from parallelisms.pipeline.schedules.zbv import Chunk, without_surplus
from parallelisms.pipeline.setting import Setting


def dualpipev(setting: Setting) -> ActionLists:
    """The compute actions of each rank."""
    fewest = 2 * setting.ranks
    if setting.microbatches >= fewest:
        return tuple(_Rank(rank, setting.ranks).run(setting.microbatches) for rank in range(setting.ranks))
    pattern = (_Rank(rank, setting.ranks).run(fewest) for rank in range(setting.ranks))
    return close_up(setting, tuple(without_surplus(actions, setting.microbatches) for actions in pattern))


class _Rank:
    """One rank's list in the making: `first` and `second` are its stages, on the way down and up the V."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank = rank
        self.above = ranks - 1 - rank  # ranks between this one and the turning point
        self.ranks = ranks
        self.first, self.second = Chunk(rank), Chunk(2 * ranks - 1 - rank)
        self.actions: list[Action] = []
        self.waiting: deque[Chunk] = deque()  # whose W is due, oldest first

    def run(self, microbatches: int) -> tuple[Action, ...]:
        first, second = self.first, self.second
        for _ in range(2 * self.above):  # step 1: F0
            self.actions.append(first.forward())
        for _ in range(self.rank + 1):  # step 2: F0 F1
            self.actions += (first.forward(), second.forward())
        for _ in range(self.above):  # step 3: I1 W1 F1, the W in the gap before the next message
            self._input(second)
            self._weight()
            self.actions.append(second.forward())
        for _ in range(microbatches - 2 * self.ranks + self.rank + 1):  # step 4: F0 B1 and F1 B0
            self.actions += (first.forward(), second.backward(), second.forward(), first.backward())
        for _ in range(self.above):  # step 5: B1, then F1 B0
            self.actions += (second.backward(), second.forward(), first.backward())
        self._drain()
        return tuple(self.actions)

    def _drain(self) -> None:
        # Step 6: B1 B0. From its middle on the backward is split, so that the ranks before get their
        # gradients sooner; the W fill the gaps of step 7.
        pairs, split = self.rank + 1, False
        for pair in range(pairs):
            split = split or (pair == pairs // 2 and self.rank % 2 == 1)
            self._backward(self.second, split)
            split = split or (pair == pairs // 2 and self.rank % 2 == 0)
            self._backward(self.first, split)
        for _ in range(self.above):  # step 7: W I0
            self._weight()
            self._backward(self.first, split)
        while self.waiting:  # step 8: the W that are left
            self._weight()

    def _backward(self, chunk: Chunk, split: bool) -> None:
        if split:
            self._input(chunk)
        else:
            self.actions.append(chunk.backward())

    def _input(self, chunk: Chunk) -> None:
        self.actions.append(chunk.input())
        self.waiting.append(chunk)

    def _weight(self) -> None:
        if self.waiting:
            self.actions.append(self.waiting.popleft().weight())


FAMILY = ScheduleFamily(
    name="DualPipeV",
    generate=dualpipev,
    placement="v",
    splits_backward=True,
    summary="forwards of one stage beside backwards of the other; holds up to p + 1/2 microbatches",
)
