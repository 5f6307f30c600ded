"""The plan as plain data, by what it is about: the text of plan.json.

Everything here follows from configuration and world size, so that ranks on different machines agree.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from parallelisms.pipeline.factory import PipelineSchedule
from trainer.plan.memory import RankMemory, forecast_memory
from trainer.plan.network import RankTraffic, forecast_traffic

if TYPE_CHECKING:
    from trainer.plan.plan import Plan, ValidationPlan


def sections_of(plan: Plan) -> dict[str, Any]:
    """All sections."""
    return {
        "model": {
            "name": plan.model,
            "sizes": asdict(plan.sizes),
            "parameters": plan.parameters,
            "flops_per_token": plan.flops_per_token,
        },
        "mesh": {
            **dict(plan.layout.dimensions),
            **({"expert": plan.layout.expert} if plan.layout.expert > 1 else {}),
        },
        "parallelism": asdict(plan.parallelism),
        "formats": asdict(plan.formats),
        "attention": asdict(plan.attention),
        "batch": {
            "batch_size": plan.batch_size,
            "seq_len": plan.seq_len,
            "microbatch_rows": list(plan.rows),
            "accumulation": plan.accumulation,
            "global_batch_size": plan.global_batch_size,
            "tokens_per_step": plan.tokens_per_step,
            "steps": plan.steps,
        },
        "stages": [asdict(stage) for stage in plan.stages],
        "bytes_per_rank": [asdict(rank) for rank in plan.bytes_of_rank],
        "memory": [memory_data(rank) for rank in forecast_memory(plan)],
        "network": [traffic_data(rank) for rank in forecast_traffic(plan)],
        "compute": {
            "flops_per_token": plan.flops_per_token,
            "recomputed_flops_per_token": plan.recomputed_flops_per_token,
            "flops_per_step": plan.flops_per_step,
            "mfu_ceiling": plan.mfu_ceiling,
        },
        "schedule": {
            "name": plan.schedule.name,
            "unit": "seconds" if plan.measured_costs else "FLOPs per token",
            "prediction": _prediction_data(plan.schedule),
            "actions": [" ".join(map(str, actions)) for actions in plan.schedule.actions],
        },
        "validation": None if plan.validation is None else _validation_data(plan.validation),
        "notes": list(plan.notes),
    }


def memory_data(memory: RankMemory) -> dict[str, Any]:
    """Bytes of a rank: what it keeps, and the moment of its peak."""
    return {
        "parameters": memory.state.parameters,
        "gradients": memory.state.gradients,
        "optimizer": memory.state.optimizer,
        "activations": memory.activations,
        "host": memory.host,
        "peak": memory.peak.total,
        "at_peak": asdict(memory.peak),
    }


def traffic_data(traffic: RankTraffic) -> dict[str, int]:
    """Bytes that a rank sends in a step."""
    return {**asdict(traffic), "total": traffic.total}


def _prediction_data(schedule: PipelineSchedule) -> dict[str, Any]:
    prediction = schedule.prediction
    return {
        "step": prediction.step,
        "bound": prediction.bound,
        "step_bubble": prediction.step_bubble,
        "rank_bubbles": list(prediction.rank_bubbles),
        "peak_activations": list(prediction.peak_activations),
    }


def _validation_data(validation: ValidationPlan) -> dict[str, Any]:
    return {
        "batch_size": validation.batch_size,
        "seq_len": validation.seq_len,
        "microbatch_rows": list(validation.rows),
        "actions": [" ".join(map(str, actions)) for actions in validation.schedule.actions],
    }
