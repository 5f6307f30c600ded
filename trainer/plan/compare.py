"""Two plans side by side: what differs in their configurations, and the figures of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trainer.config.schema import Config
from trainer.plan.memory import fullest
from trainer.plan.network import shown_kinds
from trainer.plan.tables import flops, seconds, size, table
from trainer.plan.view import PlanView


@dataclass(frozen=True)
class Difference:
    """A key of the configuration with two values."""

    key: str
    first: Any
    second: Any


@dataclass(frozen=True)
class Figure:
    """A figure of both plans; `ratio` is second / first, None where that means nothing."""

    name: str
    first: Any
    second: Any
    first_text: str
    second_text: str
    ratio: float | None


@dataclass(frozen=True)
class PlanComparison:
    """What differs, and the figures."""

    names: tuple[str, str]
    differences: tuple[Difference, ...]
    figures: tuple[Figure, ...]

    def data(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "plans": list(self.names),
            "differences": [asdict(each) for each in self.differences],
            "figures": [
                {"name": each.name, "first": each.first, "second": each.second, "ratio": each.ratio}
                for each in self.figures
            ],
        }


def compare_plans(
    names: tuple[str, str], configs: tuple[Config, Config], views: tuple[PlanView, PlanView]
) -> PlanComparison:
    """Compare two plans, each with the configuration that it was made from."""
    first, second = (_flat(config.model_dump()) for config in configs)
    keys = [key for key in {**first, **second} if first.get(key) != second.get(key)]
    differences = tuple(Difference(key, first.get(key), second.get(key)) for key in keys)
    return PlanComparison(names, differences, tuple(_figures(*views)))


def render_comparison(comparison: PlanComparison) -> str:
    """As text."""
    first, second = comparison.names
    lines = ["What differs:"] if comparison.differences else ["The configurations are the same."]
    if comparison.differences:
        rows = [[each.key, _value(each.first), _value(each.second)] for each in comparison.differences]
        lines += table(["key", first, second], rows, (0, 1, 2))
    rows = [
        [
            each.name,
            each.first_text,
            each.second_text,
            "=" if each.first == each.second else "" if each.ratio is None else f"x {each.ratio:.3g}",
        ]
        for each in comparison.figures
    ]
    return "\n".join([*lines, "", *table(["figure", first, second, ""], rows, (0,))]) + "\n"


def _figures(first: PlanView, second: PlanView) -> list[Figure]:
    ours, theirs = _measures(first), _measures(second)
    return [
        Figure(
            name, ours[name][0], theirs[name][0], ours[name][1], theirs[name][1], _ratio(ours, theirs, name)
        )
        for name in ours
        if name in theirs
    ]


def _ratio(first: Mapping[str, Any], second: Mapping[str, Any], name: str) -> float | None:
    one, two = first[name][0], second[name][0]
    if isinstance(one, bool) or not isinstance(one, int | float) or not isinstance(two, int | float):
        return None
    return two / one if one else None


def _measures(view: PlanView) -> dict[str, tuple[Any, str]]:
    """Every figure of a plan by its name: the value, and the value for reading."""
    plan = view.plan
    prediction = plan.schedule.prediction
    memory = view.memory[fullest(view.memory)]
    figures: dict[str, tuple[Any, str]] = {}

    def put(name: str, value: Any, text: str) -> None:
        figures[name] = (value, text)

    put("parameters", plan.parameters, f"{plan.parameters:,}")
    put("FLOPs per token", plan.flops_per_token, f"{plan.flops_per_token:,}")
    put("FLOPs per step", plan.flops_per_step, flops(plan.flops_per_step))
    put("ranks", plan.layout.world_size, f"{plan.layout.world_size:,}")
    for name, degree in plan.layout.dimensions:
        put(f"{name} degree", degree, str(degree))
    put("tokens per step", plan.tokens_per_step, f"{plan.tokens_per_step:,}")
    put("schedule", plan.schedule.name, plan.schedule.name)
    put("stages", len(plan.stages), str(len(plan.stages)))
    put("microbatches", plan.microbatches, str(plan.microbatches))
    put("accumulated runs", plan.accumulation, str(plan.accumulation))
    put("bubble of the step", prediction.step_bubble, f"{prediction.step_bubble:.1%}")
    put("MFU at most", plan.mfu_ceiling, f"{plan.mfu_ceiling:.1%}")
    put("checkpointing", plan.parallelism.checkpointing, plan.parallelism.checkpointing)
    for name in ("parameters", "gradients", "optimizer"):
        value = getattr(memory.state, name)
        put(f"{name} of a rank", value, size(value))
    put("activations of a rank", memory.activations, size(memory.activations))
    put("peak of a rank", memory.peak.total, size(memory.peak.total))
    for kind in shown_kinds(view.traffic):
        value = max(getattr(traffic, kind) for traffic in view.traffic)
        put(f"sent by a rank: {kind.replace('_', '-')}", value, size(value))
    if view.fits is not None:
        put("fits", view.fits, "yes" if view.fits else "no")
    if view.estimate is not None:
        estimate = view.estimate
        put("step", estimate.seconds, seconds(estimate.seconds))
        put("tokens per second", estimate.tokens_per_second, f"{estimate.tokens_per_second:,.0f}")
        put("MFU", estimate.mfu, f"{estimate.mfu:.1%}")
    return figures


def _flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _value(value: Any) -> str:
    text = "unset" if value is None else ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return text if len(text) <= 40 else text[:37] + "..."
