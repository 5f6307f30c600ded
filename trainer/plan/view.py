"""A plan seen with an accelerator and nodes in mind: what depends on where it would run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from models.activations import Kernels
from trainer.plan.accelerators import USABLE, Accelerator
from trainer.plan.memory import RankMemory, forecast_memory
from trainer.plan.network import RankTraffic, forecast_traffic
from trainer.plan.nodes import Nodes, place_in_nodes
from trainer.plan.plan import Plan
from trainer.plan.sections import memory_data
from trainer.plan.speed import EFFICIENCY, StepEstimate, estimate_step
from trainer.plan.warnings import accelerator_warnings, plan_warnings


@dataclass(frozen=True)
class PlanView:
    """A plan with all its figures. `accelerator` is None where none was named."""

    plan: Plan
    nodes: Nodes
    accelerator: Accelerator | None
    memory: tuple[RankMemory, ...]
    traffic: tuple[RankTraffic, ...]
    estimate: StepEstimate | None
    warnings: tuple[str, ...]

    @property
    def peak(self) -> int:
        """Bytes at the peak of the fullest rank."""
        return max(rank.peak.total for rank in self.memory)

    @property
    def fits(self) -> bool | None:
        """Whether the peak leaves enough of the accelerator's memory free; None where that is not known."""
        if self.accelerator is None or self.accelerator.memory is None:
            return None
        return self.peak <= USABLE * self.accelerator.memory

    def sections(self) -> dict[str, Any]:
        """The plan's sections and those that depend on where it runs."""
        return {
            **self.plan.sections(),
            "nodes": {
                "gpus_per_node": self.nodes.gpus_per_node,
                "count": self.nodes.count,
                "dimensions": {place.name: _place_data(place) for place in self.nodes.dimensions},
            },
            "accelerator": None if self.accelerator is None else self._accelerator_data(self.accelerator),
            "warnings": list(self.warnings),
        }

    def _accelerator_data(self, accelerator: Accelerator) -> dict[str, Any]:
        estimate = self.estimate
        return {
            "name": accelerator.name,
            "memory": accelerator.memory,
            "peak_flops": accelerator.peak_flops,
            "intra_node_bandwidth": accelerator.intra_node_bandwidth,
            "inter_node_bandwidth": accelerator.inter_node_bandwidth,
            "fits": self.fits,
            "memory_per_rank": [memory_data(rank) for rank in self.memory],
            "estimate": None
            if estimate is None
            else {**asdict(estimate), "seconds": estimate.seconds, "assumed_efficiency": EFFICIENCY},
        }


def view_plan(
    plan: Plan,
    gpus_per_node: int = 8,
    accelerator: Accelerator | None = None,
    notices: tuple[str, ...] = (),
) -> PlanView:
    """Work out all figures of a plan; `notices` are what the configuration itself made somebody say."""
    nodes = place_in_nodes(plan.layout, gpus_per_node)
    memory = forecast_memory(plan, Kernels.ACCELERATOR if accelerator is None else accelerator.kernels)
    return PlanView(
        plan=plan,
        nodes=nodes,
        accelerator=accelerator,
        memory=memory,
        traffic=forecast_traffic(plan),
        estimate=None if accelerator is None else estimate_step(plan, accelerator, nodes),
        warnings=(
            *notices,
            *plan_warnings(plan),
            *accelerator_warnings(plan, memory, accelerator, nodes),
        ),
    )


def _place_data(place: Any) -> dict[str, Any]:
    return {**asdict(place), "crosses_nodes": place.crosses_nodes}
