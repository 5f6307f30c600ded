"""The plan as text: what `stageline plan` prints, and the first lines of a run."""

from __future__ import annotations

from collections.abc import Sequence

from parallelisms.pipeline.factory import PipelineSchedule
from trainer.plan.plan import Plan, StagePlan

_GIB = 1024**3


def summary(plan: Plan) -> list[tuple[str, str]]:
    """What is about to run, as (subject, text), a line each."""
    lines = [
        ("model", f"{plan.model}: {plan.parameters:,} parameters, {plan.flops_per_token:,} FLOPs per token"),
        ("mesh", _mesh(plan)),
        (
            "step",
            f"{plan.global_batch_size} sequences x {plan.seq_len} = {plan.tokens_per_step:,} tokens"
            + (f", accumulated over {plan.accumulation} runs" if plan.accumulation > 1 else ""),
        ),
        ("state", f"{max(rank.total for rank in plan.bytes_of_rank) / _GIB:.2f} GiB on the fullest rank"),
    ]
    if len(plan.stages) > 1:
        lines.append(("pipeline", pipeline_line(plan)))
        hint = bubble_hint(plan)
        if hint:
            lines.append(("hint", hint))
    return lines + [("note", note) for note in plan.notes]


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


def bubble_hint(plan: Plan) -> str | None:
    """What would shrink the bubble, if microbatches are so few that it is large."""
    bubble = plan.schedule.prediction.step_bubble
    ranks = plan.layout.pipeline
    if plan.microbatches >= ranks or bubble < 0.25:
        return None
    return (
        f"{plan.microbatches} microbatches on {ranks} pipeline ranks: {bubble:.0%} of the step is bubble; "
        f"training.batch_size >= {4 * ranks} with as many microbatches would bring it to about "
        f"{(ranks - 1) / (5 * ranks - 1):.0%} under 1F1B, a smaller pipeline_parallel_degree further down"
    )


def render(plan: Plan) -> str:
    """The whole plan as text."""
    lines = [f"{subject:10}{text}" for subject, text in summary(plan)]
    lines += ["", "stage  rank  parameters       share of FLOPs  modules"]
    total = plan.flops_per_token or 1
    lines += [
        f"{stage.index:5}  {stage.owner:4}  {stage.parameters:15,}  {stage.flops_per_token / total:13.1%}  {_modules(stage)}"
        for stage in plan.stages
    ]
    lines += ["", "pipeline rank  parameters   gradients   optimizer       total  (GiB of one rank)"]
    lines += [
        f"{rank:13}  {_gib(state.parameters)}  {_gib(state.gradients)}  {_gib(state.optimizer)}  {_gib(state.total)}"
        for rank, state in enumerate(plan.bytes_of_rank)
    ]
    lines += ["", *_actions(plan.schedule)]
    return "\n".join(lines) + "\n"


def _actions(schedule: PipelineSchedule, most: int = 400) -> list[str]:
    """The action list of every pipeline rank, each cut to `most` characters."""
    lines = ["rank  actions"]
    for rank, actions in enumerate(schedule.actions):
        text = " ".join(map(str, actions))
        more = "" if len(text) <= most else f" ... ({len(actions)} actions, all in plan.json)"
        lines.append(f"{rank:4}  {text[:most]}{more}")
    return lines


def _mesh(plan: Plan) -> str:
    degrees = [f"{name} {degree}" for name, degree in plan.layout.dimensions if degree > 1]
    return f"{plan.layout.world_size} ranks: " + (" x ".join(degrees) if degrees else "one process")


def _modules(stage: StagePlan) -> str:
    layers = [name for name in stage.modules if name.startswith("layers.")]
    others = [name for name in stage.modules if name not in layers]
    span = [layers[0]] if len(layers) == 1 else [f"{layers[0]} .. {layers[-1]}"] if layers else []
    before = [name for name in others if name == stage.modules[0]]
    return ", ".join([*before, *span, *(name for name in others if name not in before)])


def _range(rows: Sequence[int]) -> str:
    return str(rows[0]) if len(set(rows)) == 1 else f"{min(rows)} to {max(rows)}"


def _gib(count: int) -> str:
    return f"{count / _GIB:10.3f}"
