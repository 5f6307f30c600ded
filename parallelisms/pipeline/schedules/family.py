"""What the catalogue knows about a schedule: its names, its generator, and where its stages sit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from parallelisms.pipeline.actions import ActionLists
from parallelisms.pipeline.errors import IllegalSettingError
from parallelisms.pipeline.setting import Placement, Setting


@dataclass(frozen=True)
class ScheduleFamily:
    """A schedule for every setting.

    `generate` is pure: Setting to the compute actions of each rank. `placement` is where stages sit: "loop"
    (stage s on rank s mod p), "v" (two stages a rank, down and up again) or "any" of the two.
    `single_stage` schedules have one stage per rank. `splits_backward` tells whether the backward is done in
    two actions (I and W), which changes the lower bound.
    """

    name: str
    generate: Callable[[Setting], ActionLists]
    aliases: tuple[str, ...] = ()
    placement: Literal["loop", "v", "any"] = "loop"
    single_stage: bool = False
    splits_backward: bool = False
    summary: str = ""

    @property
    def default_stages_per_rank(self) -> int:
        """Stages per rank when the configuration names none: one, or two for multi-stage schedules."""
        return 1 if self.single_stage else 2

    def place(self, ranks: int, stages_per_rank: int | None = None) -> Placement:
        """The placement of `ranks` x `stages_per_rank` stages. Raises IllegalSettingError."""
        each = self.default_stages_per_rank if stages_per_rank is None else stages_per_rank
        if ranks < 1 or each < 1:
            raise IllegalSettingError(
                f"{self.name}: {ranks} ranks with {each} stages each: both must be 1 or more"
            )
        if self.placement != "loop" and each == 2:
            # Of the two, the V: no transfer at its turning point, and half the memory goes much further.
            return Placement.v_shaped(ranks)
        placement = Placement.looped(ranks, each)
        self.check_placement(placement)
        return placement

    def check_placement(self, placement: Placement) -> None:
        """Raise IllegalSettingError unless the schedule exists for this placement."""
        ranks = placement.ranks
        each, rest = divmod(placement.stages, ranks)
        if rest:
            raise IllegalSettingError(
                f"{self.name}: {placement.stages} stages on {ranks} ranks: "
                f"every rank must have the same number of stages"
            )
        if self.single_stage and each != 1:
            raise IllegalSettingError(
                f"{self.name} has one stage per rank, but {placement.stages} stages on {ranks} ranks are "
                f"{each} per rank; use one, or a schedule with several, such as Interleaved1F1B"
            )
        if self.placement == "v" and each != 2:
            raise IllegalSettingError(
                f"{self.name} places two stages on each rank, down and up again; "
                f"{each} per rank is not possible with it"
            )
        loop, v_shaped = Placement.looped(ranks, each), Placement.v_shaped(ranks)
        legal = {"loop": [loop], "v": [v_shaped], "any": [loop, v_shaped]}
        if placement not in legal[self.placement]:
            wanted = " or ".join(str(list(each.owners)) for each in legal[self.placement])
            raise IllegalSettingError(
                f"{self.name} needs the stages on ranks {wanted}, not on {list(placement.owners)}"
            )

    def check(self, setting: Setting) -> None:
        """Raise IllegalSettingError unless `generate` is defined for the setting."""
        if setting.microbatches < 1:
            raise IllegalSettingError(
                f"{self.name}: {setting.microbatches} microbatches: at least 1 is needed"
            )
        self.check_placement(setting.placement)
        stages = setting.stages
        costs = setting.costs
        for name in ("forward", "backward_input", "backward_weight"):
            if len(getattr(costs, name)) != stages:
                raise IllegalSettingError(
                    f"{self.name}: costs.{name} has {len(getattr(costs, name))} entries for {stages} stages"
                )
