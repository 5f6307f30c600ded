"""What the search finds: layouts with their figures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from trainer.plan.accelerators import USABLE, Accelerator
from trainer.plan.candidates import Candidate
from trainer.plan.nodes import DimensionPlace
from trainer.plan.speed import EFFICIENCY

_OF_EACH_DEGREE = 2  # proposals with the same pipeline degree
_SAME = 0.005  # relative difference of times below which two layouts are equally fast


@dataclass(frozen=True)
class Proposal:
    """A layout with its figures; bytes are those of the fullest rank, times seconds of one step.

    Attributes:
        candidate: pipeline, schedule, microbatches, checkpointing.
        replicate, shard: how its data-parallel ranks are split.
        seconds: of a step.
        exposed: of it, gathering and reducing that nothing hides.
        bubble: the share of ranks x time in which the pipeline computes nothing.
        mfu, tokens_per_second: of the whole job.
        peak: bytes at the peak.
        peak_without_checkpointing: the same if nothing were computed again.
        places: where the dimensions lie.
        arguments: what to add to the command line to get this layout; none for the configuration's own.
    """

    candidate: Candidate
    replicate: int
    shard: int
    seconds: float
    exposed: float
    bubble: float
    mfu: float
    tokens_per_second: float
    peak: int
    peak_without_checkpointing: int
    places: tuple[DimensionPlace, ...]
    arguments: tuple[str, ...]

    @property
    def as_configured(self) -> bool:
        """Whether this is the configuration's own layout."""
        return not self.arguments


@dataclass(frozen=True)
class SearchResult:
    """What was found, best first.

    Attributes:
        accelerator, gpus_per_node, world_size: for what.
        sequences, seq_len: of a step.
        proposals: the best that fit.
        configured: the configuration's own layout, where it is possible for so many ranks.
        nearest: what needs least, where nothing fits.
        considered: how many layouts there are, apart from replicas and shards.
        planned: how many of them were planned in full.
        complete: whether the rest cannot be better; otherwise the work allowed was done before.
    """

    accelerator: Accelerator
    gpus_per_node: int
    world_size: int
    sequences: int
    seq_len: int
    proposals: tuple[Proposal, ...]
    configured: Proposal | None
    nearest: Proposal | None
    considered: int
    planned: int
    complete: bool

    @property
    def usable(self) -> int:
        """Bytes that a rank may need."""
        return usable_memory(self.accelerator)

    def data(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "accelerator": self.accelerator.name,
            "world_size": self.world_size,
            "gpus_per_node": self.gpus_per_node,
            "sequences_per_step": self.sequences,
            "tokens_per_step": self.sequences * self.seq_len,
            "assumed_efficiency": EFFICIENCY,
            "usable_memory": self.usable,
            "considered": self.considered,
            "planned": self.planned,
            "complete": self.complete,
            "proposals": [asdict(each) for each in self.proposals],
            "configured": None if self.configured is None else asdict(self.configured),
            "nearest": None if self.nearest is None else asdict(self.nearest),
        }


def usable_memory(accelerator: Accelerator) -> int:
    """Bytes that a plan may fill."""
    assert accelerator.memory is not None
    return int(USABLE * accelerator.memory)


def best(proposals: Iterable[Proposal], top: int) -> tuple[Proposal, ...]:
    """The best `top` in order: one for each pipeline degree and schedule, and few for each degree."""
    chosen: dict[tuple[int, str], Proposal] = {}
    of_degree: Counter[int] = Counter()
    for proposal in sorted(proposals, key=order):
        candidate = proposal.candidate
        key = (candidate.pipeline, candidate.schedule)
        if key not in chosen and of_degree[candidate.pipeline] < _OF_EACH_DEGREE:
            chosen[key] = proposal
            of_degree[candidate.pipeline] += 1
    return tuple(chosen.values())[:top]


def order(proposal: Proposal) -> tuple[float, ...]:
    """The fastest first; of about equally fast ones that which is simpler and needs less."""
    return (
        round(math.log(proposal.seconds) / _SAME),
        proposal.candidate.splits_backward,
        proposal.candidate.pipeline,
        proposal.peak,
    )
