"""Bytes that a rank of an expert group sends to the others in a step: tokens to their experts, and their results back.

Each token travels once for each of its experts, unless that is on the rank itself, and as often back; in the backward
the gradients take the same ways. Where a whole layer is computed again its tokens travel again; recomputation by
operation keeps what came. Counted is an even use of the experts, of which a rank has 1 in n; a busy expert's rank
receives more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parallelisms.expert_plan import is_of_experts
from trainer.plan.formats import Recomputed, recomputed

if TYPE_CHECKING:
    from trainer.plan.plan import Plan


@dataclass(frozen=True)
class ExpertTraffic:
    """Bytes sent in the forwards and in the backwards of a step; what is computed again counts in the backwards."""

    forward: int = 0
    backward: int = 0

    @property
    def total(self) -> int:
        return self.forward + self.backward


def expert_traffic(plan: Plan, modules: Sequence[str]) -> ExpertTraffic:
    """By the stage of these modules. Nothing without expert parallelism."""
    ranks = plan.layout.expert
    if ranks == 1:
        return ExpertTraffic()
    layers = [module for module in modules if any(map(is_of_experts, plan.sizes.parameter_shapes(module)))]
    again = sum(recomputed(layer, plan.parallelism) is Recomputed.ALL for layer in layers)
    tokens = sum(plan.rows) * plan.rank_seq_len * plan.accumulation
    uses = tokens * getattr(plan.sizes, "n_experts_per_token", 1)
    both_ways = 2 * uses * plan.sizes.dim * plan.formats.compute_bytes * (ranks - 1) // ranks
    return ExpertTraffic(len(layers) * both_ways, (len(layers) + again) * both_ways)
