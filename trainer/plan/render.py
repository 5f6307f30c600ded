"""The plan as text: what `stageline plan` prints, and the first lines of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from models.tied import EMBEDDING, copies_embedding
from parallelisms.pipeline.costs import scaled
from parallelisms.pipeline.simulate import simulate
from parallelisms.pipeline.split import is_layer
from trainer.plan.accelerators import USABLE, Accelerator
from trainer.plan.memory import RankMemory, forecast_memory, fullest
from trainer.plan.network import shown_kinds
from trainer.plan.nodes import global_ranks
from trainer.plan.plan import Plan, StagePlan
from trainer.plan.speed import EFFICIENCY, StepEstimate
from trainer.plan.tables import ByteUnit, flops, seconds, size, table, unit_for
from trainer.plan.view import PlanView, view_plan
from trainer.plan.warnings import plan_warnings

if TYPE_CHECKING:
    from parallelisms.pipeline.picture import Picture

_MOST_STAGES = 24  # that have a line each


def summary(plan: Plan) -> list[tuple[str, str]]:
    """What is about to run, as (subject, text), a line each."""
    return [
        *_facts(plan, forecast_memory(plan)),
        *(("warning", warning) for warning in plan_warnings(plan)),
        *(("note", note) for note in plan.notes),
    ]


def _facts(plan: Plan, memory: Sequence[RankMemory]) -> list[tuple[str, str]]:
    lines = [
        ("model", _model(plan)),
        ("mesh", _mesh(plan)),
        (
            "step",
            f"{plan.global_batch_size} sequences x {plan.seq_len} = {plan.tokens_per_step:,} tokens"
            + (f", accumulated over {plan.accumulation} runs" if plan.accumulation > 1 else ""),
        ),
        ("memory", _memory_line(memory)),
    ]
    if len(plan.stages) > 1:
        lines.append(("pipeline", pipeline_line(plan)))
    return lines


def _model(plan: Plan) -> str:
    active = plan.sizes.active_parameter_count()
    used = "" if active == plan.sizes.parameter_count() else f", of which a token uses {active:,}"
    return f"{plan.model}: {plan.parameters:,} parameters{used}, {plan.flops_per_token:,} FLOPs per token"


def _memory_line(memory: Sequence[RankMemory]) -> str:
    most = memory[fullest(memory)]
    text = f"{size(most.peak.total)} at the peak of the fullest rank"
    text += f": state {size(most.state.total)}, activations {size(most.activations)}"
    return text + (f"; {size(most.host)} in the host's memory" if most.host else "")


def pipeline_line(plan: Plan) -> str:
    """Schedule, stages, microbatches, and what is predicted of them."""
    schedule, prediction = plan.schedule, plan.schedule.prediction
    over = prediction.step / prediction.bound if prediction.bound else 1.0
    return (
        f"{schedule.name}, {len(plan.stages)} stages on {plan.layout.pipeline} ranks, "
        f"{plan.microbatches} microbatches of {_range(plan.rows)} sequences; "
        f"bubble {prediction.step_bubble:.0%} of the step, {over:.2f} x the lower bound; "
        f"at most {max(schedule.proof.peak_share):.3g} microbatches' activations on a rank"
    )


def render(plan: Plan, width: int = 120) -> str:
    """The whole plan as text, for no accelerator in particular."""
    return render_view(view_plan(plan), width)


def render_view(view: PlanView, width: int = 120) -> str:
    """The whole plan as text, no line of the picture longer than `width`."""
    return "\n".join([*before_picture(view), *picture_lines(view.plan, width)]) + "\n"


def before_picture(view: PlanView) -> list[str]:
    """What comes before the picture of the schedule."""
    plan = view.plan
    facts = [*_facts(plan, view.memory), ("compute", _compute(plan))]
    if view.accelerator is not None:
        facts.append(("on", _accelerator_line(view, view.accelerator)))
    if view.estimate is not None:
        facts.append(("estimate", _estimate_line(view.estimate)))
    facts += [("note", note) for note in plan.notes]
    lines = [f"{subject:10}{text}" for subject, text in facts]
    lines += [f"{'warning':10}{warning}" for warning in view.warnings]
    lines += ["", *_places(view), "", *_stages(plan), "", *_memory(view), "", *_network(view)]
    return lines


def picture_lines(plan: Plan, width: int) -> list[str]:
    """The schedule as a picture, ranks down and time across; nothing for a single rank."""
    if plan.layout.pipeline == 1:
        return []
    from parallelisms.pipeline.picture_text import plain_text

    return ["", *plain_text(picture_of(plan), width).rstrip("\n").split("\n")]


def picture_of(plan: Plan) -> Picture:
    """The picture of the schedule; its unit of time is the forward of one microbatch on the mean stage."""
    from parallelisms.pipeline.picture_build import picture_of_plan

    schedule = plan.schedule
    unit = sum(plan.costs.forward) / len(plan.costs.forward) or 1.0
    prediction = simulate(schedule.actions, schedule.placement, scaled(plan.costs, 1 / unit))
    return picture_of_plan(replace(schedule, prediction=prediction))


def action_lines(plan: Plan) -> list[str]:
    """The action list of every pipeline rank."""
    ranks = [f"{rank:4}  {' '.join(map(str, actions))}" for rank, actions in enumerate(plan.schedule.actions)]
    return ["rank  actions", *ranks]


def _compute(plan: Plan) -> str:
    text = f"{flops(plan.flops_per_step)} a step"
    if plan.recomputed_flops_per_token:
        extra = plan.recomputed_flops_per_token / plan.flops_per_token
        text += f", and {extra:.0%} more for what activation checkpointing computes again"
    run = plan.steps * plan.tokens_per_step
    text += f"; MFU of {plan.mfu_ceiling:.1%} at most"
    return f"{text}; {plan.steps:,} steps are {run:,} tokens, {run / plan.parameters:.2g} per parameter"


def _accelerator_line(view: PlanView, accelerator: Accelerator) -> str:
    if accelerator.memory is None:
        return accelerator.name
    room = f"{size(accelerator.memory)} of {accelerator.name}"
    used = f"{view.peak / accelerator.memory:.0%} of {room}"
    return f"{used}: fits" if view.fits else f"{used}: does not fit (a plan may fill {USABLE:.0%})"


def _estimate_line(estimate: StepEstimate) -> str:
    return (
        f"{seconds(estimate.seconds)} a step, {estimate.tokens_per_second:,.0f} tokens per second, "
        f"MFU {estimate.mfu:.0%}, if kernels reach {EFFICIENCY:.0%} of the peak; "
        f"{seconds(estimate.exposed)} of it gathering and reducing that nothing hides"
    )


def _places(view: PlanView) -> list[str]:
    rows = [[place.name, str(place.degree), place.where, place.meaning] for place in view.nodes.dimensions]
    lines = table(
        ["dimension", "degree", f"in nodes of {view.nodes.gpus_per_node}", "what for"], rows, (0, 2, 3)
    )
    if view.plan.layout.pipeline > 1:
        rows = []
        for rank in range(view.plan.layout.pipeline):
            first, last = global_ranks(view.plan.layout, rank)
            each = view.nodes.gpus_per_node
            stages = view.plan.schedule.placement.stages_of(rank)
            rows.append(
                [
                    str(rank),
                    _from_to(first, last),
                    _from_to(first // each, last // each),
                    ", ".join(map(str, stages)),
                ]
            )
        lines += ["", *table(["pipeline rank", "global ranks", "nodes", "stages"], rows, (3,))]
    return lines


def _stages(plan: Plan) -> list[str]:
    """A line for each stage; of a large number of stages, one for each run of like ones."""
    total = plan.flops_per_token or 1
    few = len(plan.stages) <= _MOST_STAGES
    rows = []
    for _, group in groupby(plan.stages, key=lambda stage: stage.index if few else _likeness(stage)):
        stages = list(group)
        first, last = stages[0], stages[-1]
        owners = {stage.owner for stage in stages}
        names = (
            _modules(first.modules) if len(stages) == 1 else _modules((first.modules[0], last.modules[-1]))
        )
        if copies_embedding(plan.sizes, last.modules):
            names += f" (tied to {EMBEDDING}: a copy of it)"
        rows.append(
            [
                _from_to(first.index, last.index),
                _from_to(min(owners), max(owners)),
                f"{first.parameters:,}",
                f"{first.flops_per_token / total:.1%}",
                names,
            ]
        )
    head = ["stage", "rank", "parameters", "share of FLOPs", "modules"]
    return table(head if few else [*head[:2], "parameters of each", *head[3:]], rows, (4,))


def _likeness(stage: StagePlan) -> tuple[int, int, int]:
    return stage.parameters, stage.flops_per_token, stage.recomputed_flops_per_token


def _memory(view: PlanView) -> list[str]:
    unit = unit_for(view.peak)
    head = [
        "pipeline rank",
        "parameters",
        "gradients",
        "optimizer",
        "gathered",
        "unreduced",
        "activations",
        "buffers",
        "workspace",
        "peak",
        "during",
    ]
    rows = _like_ranks([_memory_cells(memory, unit) for memory in view.memory])
    return [f"{unit.name} of one rank at its peak:", *table(head, rows, (10,))]


def _memory_cells(memory: RankMemory, unit: ByteUnit) -> tuple[str, ...]:
    peak = memory.peak
    parts = (
        peak.parameters,
        peak.gradients,
        peak.optimizer,
        peak.gathered,
        peak.unreduced,
        peak.activations,
        peak.buffers,
        peak.workspace,
        peak.total,
    )
    # Stages of like ranks have other numbers; what is done to them is the same.
    return (*map(unit.show, parts), peak.doing)


def _network(view: PlanView) -> list[str]:
    unit = unit_for(max(traffic.total for traffic in view.traffic))
    kinds = shown_kinds(view.traffic)
    rows = _like_ranks(
        [tuple(unit.show(getattr(traffic, kind)) for kind in kinds) for traffic in view.traffic]
    )
    head = ["pipeline rank", *(kind.replace("_", "-") for kind in kinds)]
    return [f"{unit.name} that one rank sends in a step:", *table(head, rows)]


def _like_ranks(cells: Sequence[tuple[str, ...]]) -> list[list[str]]:
    """A row for each run of ranks with the same cells, which ranks it is for in front."""
    rows = []
    for same, group in groupby(enumerate(cells), key=lambda each: each[1]):
        ranks = [rank for rank, _ in group]
        rows.append([_from_to(ranks[0], ranks[-1]), *same])
    return rows


def _mesh(plan: Plan) -> str:
    degrees = [f"{name} {degree}" for name, degree in plan.layout.dimensions if degree > 1]
    experts = f", experts over {plan.layout.expert}" if plan.layout.expert > 1 else ""
    return f"{plan.layout.world_size} ranks: " + (" x ".join(degrees) if degrees else "one process") + experts


def _modules(modules: Sequence[str]) -> str:
    layers = [name for name in modules if is_layer(name)]
    span = [layers[0]] if len(layers) == 1 else [f"{layers[0]} .. {layers[-1]}"] if layers else []
    first = [name for name in modules[:1] if not is_layer(name)]
    return ", ".join([*first, *span, *(name for name in modules[len(first) :] if not is_layer(name))])


def _range(rows: Sequence[int]) -> str:
    return str(rows[0]) if len(set(rows)) == 1 else f"{min(rows)} to {max(rows)}"


def _from_to(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} .. {last}"
