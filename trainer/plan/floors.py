"""The least that a candidate of the search takes: time and memory, without making its schedule."""

from __future__ import annotations

from dataclasses import dataclass

from models.activations import Kernels
from models.sizes import Sizes
from parallelisms.layout import Layout, Parallelism
from parallelisms.pipeline.bounds import lower_bound
from parallelisms.pipeline.setting import Costs
from parallelisms.pipeline.split import StageSplit
from trainer.plan.activations import StageActivations, stage_activations
from trainer.plan.candidates import Candidate
from trainer.plan.formats import Formats
from trainer.plan.splits import Splits
from trainer.plan.stages import plan_stages, stage_costs
from trainer.plan.state import Moments, StageParameters

# Microbatches that the fullest rank holds, in pipeline ranks, where there are more microbatches than that; see the
# pictures and the tests of the schedules. What is not here holds about as many as there are ranks.
_HELD = {"V-Half": 1 / 2, "V-Min": 1 / 3, "ZB-H2": 1.5}
# The fullest rank need not be the one with the largest stages.
_MARGIN = 0.9


@dataclass(frozen=True)
class Floor:
    """FLOPs per token along the critical path of a step times its tokens, and bytes of the fullest rank."""

    flops: float
    memory: float


class Floors:
    """Works out floors for one model, and remembers what stages cost."""

    def __init__(
        self,
        sizes: Sizes,
        splits: Splits,
        seq_len: int,
        formats: Formats,
        world_size: int,
        moments: Moments,
        loss_chunk: int | None,
    ) -> None:
        self._sizes = sizes
        self._splits = splits
        self._seq_len = seq_len
        self._formats = formats
        self._world_size = world_size
        self._moments = moments
        self._loss_chunk = loss_chunk
        self._costs: dict[tuple[int, str, bool], Costs] = {}
        self._activations: dict[tuple[int, str, bool], tuple[StageActivations, ...]] = {}
        self._parameters: dict[tuple[int, int, bool], tuple[StageParameters, ...]] = {}

    def of(self, candidate: Candidate) -> Floor:
        """The floor of a candidate, whatever its split into replicas and shards."""
        placement = candidate.placement
        costs = self._costs_of(candidate)
        path = lower_bound(placement, costs, candidate.microbatches, candidate.splits_backward)
        memory = max(
            self._rank_memory(candidate, placement.stages_of(rank)) for rank in range(placement.ranks)
        )
        return Floor(path * candidate.rows * self._seq_len, memory)

    def _rank_memory(self, candidate: Candidate, owned: tuple[int, ...]) -> float:
        data_ranks = self._world_size // candidate.pipeline
        key = (candidate.placement.stages, data_ranks, candidate.by_parameters)
        if key not in self._parameters:
            self._parameters[key] = tuple(
                StageParameters.of(self._sizes, modules, Layout(shard=data_ranks), self._moments)
                for modules in self._split(candidate).stages
            )
        stages = [self._parameters[key][stage] for stage in owned]
        memory = float(sum(stage.state.parameters + stage.state.optimizer for stage in stages))
        if candidate.pipeline > 1 or candidate.microbatches > 1:
            numbers = sum(stage.whole for stage in stages)
            memory += numbers * (self._formats.compute_bytes + self._formats.reduction_bytes)
        share = max(1.0, _HELD.get(candidate.schedule, 1.0) * candidate.pipeline)
        activations = self._activations_of(candidate)
        held = sum(activations[stage].held_of(candidate.rows) for stage in owned)
        # The last rank of a schedule without a V holds the fewest: counted is what every rank holds.
        least = share if owned[0] == 0 else 1.0
        return memory + _MARGIN * held * min(candidate.microbatches, least)

    def _costs_of(self, candidate: Candidate) -> Costs:
        key = (candidate.placement.stages, candidate.checkpointing, candidate.by_parameters)
        if key not in self._costs:
            stages = plan_stages(
                self._sizes,
                self._seq_len,
                self._split(candidate),
                candidate.placement,
                _parallelism(candidate),
                fused_loss=self._loss_chunk is not None,
            )
            self._costs[key] = stage_costs(stages)
        return self._costs[key]

    def _activations_of(self, candidate: Candidate) -> tuple[StageActivations, ...]:
        key = (candidate.placement.stages, candidate.checkpointing, candidate.by_parameters)
        if key not in self._activations:
            self._activations[key] = tuple(
                stage_activations(
                    self._sizes,
                    modules,
                    first=index == 0,
                    seq_len=self._seq_len,
                    formats=self._formats,
                    parallelism=_parallelism(candidate),
                    kernels=Kernels.ACCELERATOR,
                    loss_chunk=self._loss_chunk,
                )
                for index, modules in enumerate(self._split(candidate).stages)
            )
        return self._activations[key]

    def _split(self, candidate: Candidate) -> StageSplit:
        return self._splits.of(candidate.placement.stages, candidate.by_parameters)


def _parallelism(candidate: Candidate) -> Parallelism:
    return Parallelism(sharded=True, keep_gathered=True, checkpointing=candidate.checkpointing)
