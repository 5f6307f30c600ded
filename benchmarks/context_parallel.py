"""Attention over context ranks against attention of one process: time of the slowest rank, and memory.

    PYTHONPATH=. python benchmarks/context_parallel.py [--ranks 2 4] [--length 4096] [--documents] [--repeats 3]

Forward and backward of one layer. Time is the processor time of a rank, so that neither other work on the machine nor
ranks that wait for a core count; the least of the repeats. Printed is time × ranks / time of one process, of which as
many run at once: 1 would be perfect division, and what is above it is uneven work, merging, copies, and messages as far
as they cost the processor. Memory is the most that is alive at once beside the rank's own queries, keys and values,
times ranks, by what the same is in one process.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from models.layers.attend import Attend
from models.layers.sequences import Sequences
from parallelisms.collectives import Group as Members
from parallelisms.context.apply import apply_context_parallelism
from parallelisms.context.cut import SequenceCut
from parallelisms.context.gather import gather_backward, gather_forward
from parallelisms.context.ring import ring_backward, ring_forward
from parallelisms.context.span import Group, Span
from parallelisms.context.split import SequenceSplit
from parallelisms.layout import RotateMethod
from tests.distributed.ranks import run_ranks
from tests.plan.measure import Alive

_METHODS: tuple[RotateMethod, ...] = ("allgather", "alltoall", "ulysses")
_HEADS, _KV_HEADS, _WIDTH = 8, 4, 64


@dataclass(frozen=True)
class Bench:
    ranks: int
    length: int
    documents: bool
    repeats: int
    method: RotateMethod = "allgather"
    balanced: bool = True

    def sequences(self) -> Sequences:
        whole = Sequences.in_order(self.length, torch.device("cpu"))
        if not self.documents:
            return whole
        return Sequences.packed((torch.arange(self.length) // 500)[None])


@dataclass(frozen=True)
class Cost:
    seconds: float
    bytes: int


def one_process(rank: int, bench: Bench) -> Cost:
    own = _random(bench.length)
    return _cost(Attend(), own, bench.sequences(), bench.repeats)


def one_rank(rank: int, bench: Bench) -> Cost:
    mesh = init_device_mesh("cpu", (bench.ranks,))
    split = SequenceSplit(bench.ranks, bench.balanced)
    sequences = SequenceCut(split, rank).sequences(bench.sequences())
    attention = nn.ModuleList([Attend()])
    apply_context_parallelism(attention, mesh, split, bench.method)
    own = _random(bench.length // bench.ranks)
    cost = _cost(attention[0], own, sequences, bench.repeats)
    if bench.method == "ulysses":
        return cost
    # Beneath the operation that the layer calls, of which nothing but the result is seen from outside.
    span = Span(Group(Members.of(mesh), split), bench.length, _WIDTH**-0.5, None, sequences.whole_documents)
    return Cost(cost.seconds, _bytes_beneath(span, own, ring=bench.method == "alltoall"))


def _random(length: int) -> list[Tensor]:
    shapes = ((1, heads, length, _WIDTH) for heads in (_HEADS, _KV_HEADS, _KV_HEADS))
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def _cost(attend: nn.Module, own: list[Tensor], sequences: Sequences, repeats: int) -> Cost:
    seconds = []
    for _ in range(repeats + 1):  # the first one makes connections and buffers
        start = time.process_time()
        attend(*own, sequences).sum().backward()
        seconds.append(time.process_time() - start)
        for x in own:
            x.grad = None
    with Alive() as alive:
        attend(*own, sequences).sum().backward()
    return Cost(min(seconds[1:]), alive.most)


def _bytes_beneath(span: Span, own: list[Tensor], *, ring: bool) -> int:
    with torch.no_grad(), Alive() as alive:
        whole = (ring_forward if ring else gather_forward)(span, *own)
        gradient = torch.ones_like(whole.output)
        (ring_backward if ring else gather_backward)(span, *own, whole, gradient)
    return alive.most


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--documents", action="store_true", help="each 500 tokens are a document")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    print("| method | split | ranks | time × ranks / one process | memory × ranks / one process |")
    print("|---|---|---|---|---|")
    common = (arguments.length, arguments.documents, arguments.repeats)
    for ranks in arguments.ranks:
        alone = run_ranks(one_process, ranks, Bench(1, *common), timeout=300)
        seconds = sum(cost.seconds for cost in alone) / ranks
        for method in _METHODS:
            for balanced in (True, False):
                costs = run_ranks(one_rank, ranks, Bench(ranks, *common, method, balanced), timeout=300)
                slowest, largest = (max(getattr(c, name) for c in costs) for name in ("seconds", "bytes"))
                split = "headtail" if balanced else "none"
                time_ratio, memory_ratio = slowest * ranks / seconds, largest * ranks / alone[0].bytes
                print(f"| {method} | {split} | {ranks} | {time_ratio:.2f} | {memory_ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
