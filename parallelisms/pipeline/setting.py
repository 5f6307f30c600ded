"""What a schedule is made for: ranks, stages and where they sit, microbatches, costs, memory cap."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """Which pipeline rank owns each stage: `owners[stage]` is a rank."""

    owners: tuple[int, ...]

    @property
    def stages(self) -> int:
        return len(self.owners)

    @property
    def ranks(self) -> int:
        return max(self.owners) + 1

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in order."""
        return tuple(stage for stage, owner in enumerate(self.owners) if owner == rank)

    @classmethod
    def looped(cls, ranks: int, stages_per_rank: int) -> Placement:
        """Stage s sits on rank s mod p: 0 1 2 3 0 1 2 3."""
        return cls(tuple(stage % ranks for stage in range(ranks * stages_per_rank)))

    @classmethod
    def v_shaped(cls, ranks: int) -> Placement:
        """Two stages a rank, down and up again: 0 1 2 3 3 2 1 0."""
        return cls(tuple(range(ranks)) + tuple(reversed(range(ranks))))


@dataclass(frozen=True)
class Costs:
    """Time of each stage's work on one microbatch, in any one unit; `transfer` is the time of one message."""

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    transfer: float = 0.0

    @classmethod
    def equal(
        cls,
        stages: int,
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        transfer: float = 0.0,
    ) -> Costs:
        return cls((forward,) * stages, (backward_input,) * stages, (backward_weight,) * stages, transfer)


@dataclass(frozen=True)
class Setting:
    """The input of every schedule. `memory_cap` is in microbatch activations of one rank's whole share."""

    placement: Placement
    microbatches: int
    costs: Costs
    memory_cap: float | None = None

    @property
    def ranks(self) -> int:
        return self.placement.ranks

    @property
    def stages(self) -> int:
        return self.placement.stages

    @property
    def stages_per_rank(self) -> int:
        """Stages of the fullest rank."""
        return max(len(self.placement.stages_of(rank)) for rank in range(self.ranks))
