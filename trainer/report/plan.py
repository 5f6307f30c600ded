"""What was planned: the key figures of each run's plan, its stages, and the memory and traffic of its ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from trainer.plan.tables import flops
from trainer.report.html import Html, element, joined
from trainer.report.loose import Loose
from trainer.report.run import Run
from trainer.report.widgets import Fact, comparison, facts, heading, note, opens, section, table
from trainer.report.words import UNKNOWN, count, counted, memory, share, time

_PEAK = (
    "parameters",
    "gradients",
    "optimizer",
    "gathered",
    "unreduced",
    "activations",
    "buffers",
    "workspace",
    "total",
)
_TRAFFIC = ("gather", "reduce_scatter", "all_reduce", "activations", "gradients")


def plan(runs: Sequence[Run]) -> Html:
    """The section about the plans."""
    several = len(runs) > 1
    columns = [list(_figures(run.plan)) for run in runs]
    shown = comparison([run.name for run in runs], columns) if several else facts(columns[0])
    details = (part for index, run in enumerate(runs) for part in _details(index, run, several))
    return section("plan", "Plan", shown, *details)


def _figures(plan: Loose) -> Iterator[Fact]:
    if not plan.members():
        yield Fact("Plan", "could not be read")
        return
    yield Fact("Model", plan["model"]["name"].string() or UNKNOWN)
    yield Fact("Parameters", count(plan["model"]["parameters"].number()))
    yield Fact("Mesh", _mesh(plan["mesh"]))
    yield Fact("Step", _batch(plan["batch"]))
    yield Fact("Run", _length(plan))
    yield Fact("Computes in", _formats(plan))
    if len(plan["stages"].items()) > 1:
        yield Fact("Schedule", _schedule(plan))
        yield Fact("Predicted", _prediction(plan["schedule"]))
    yield Fact("Memory of the fullest rank", _fullest(plan["memory"].items()))
    work = plan["compute"]["flops_per_step"].number()
    yield Fact("Work of a step", UNKNOWN if work is None else flops(work))
    notes = [said for line in plan["notes"].items() if (said := line.string())]
    if notes:
        yield Fact("Notes", "; ".join(notes))


def _mesh(mesh: Loose) -> str:
    degrees = {name: degree.whole() or 1 for name, degree in mesh.members().items()}
    ranks = 1
    for degree in degrees.values():
        ranks *= degree
    split = " × ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)
    return counted(ranks, "rank", "ranks") + (f": {split}" if split else "")


def _batch(batch: Loose) -> str:
    sequences, length = batch["global_batch_size"].number(), batch["seq_len"].number()
    text = (
        f"{count(sequences)} sequences × {count(length)} = {count(batch['tokens_per_step'].number())} tokens"
    )
    runs = batch["accumulation"].whole() or 1
    return text + (f", accumulated over {runs} runs" if runs > 1 else "")


def _length(plan: Loose) -> str:
    steps, tokens = plan["batch"]["steps"].number(), plan["batch"]["tokens_per_step"].number()
    if steps is None or tokens is None:
        return UNKNOWN
    return f"{count(steps)} steps, {count(steps * tokens)} tokens"


def _formats(plan: Loose) -> str:
    formats, parallelism = plan["formats"], plan["parallelism"]
    text = f"{formats['compute'].string() or UNKNOWN}, gradients summed in {formats['reduction'].string() or UNKNOWN}"
    checkpointing = parallelism["checkpointing"].string()
    if checkpointing not in (None, "none"):
        text += f"; activation checkpointing {checkpointing}"
    return text + ("; offloaded to the host" if parallelism["cpu_offload"].value is True else "")


def _schedule(plan: Loose) -> str:
    microbatches = len(plan["batch"]["microbatch_rows"].items())
    stages = counted(len(plan["stages"].items()), "stage", "stages")
    name = plan["schedule"]["name"].string() or UNKNOWN
    return f"{name}, {stages}, {counted(microbatches, 'microbatch', 'microbatches')}"


def _prediction(schedule: Loose) -> str:
    predicted = schedule["prediction"]
    step, bound = predicted["step"].number(), predicted["bound"].number()
    parts = [f"bubble {share(predicted['step_bubble'].number())} of the step"]
    if step is not None and bound:
        parts.append(f"{step / bound:.2f} × the lower bound")
    if schedule["unit"].string() == "seconds":
        parts.insert(0, f"{time(step)} a step")
    return ", ".join(parts)


def _fullest(ranks: Sequence[Loose]) -> str:
    peak = max((value for rank in ranks if (value := rank["peak"].number()) is not None), default=None)
    return memory(peak)


def _details(index: int, run: Run, several: bool) -> Iterator[Html]:
    if not run.plan.members():
        return
    yield heading(index, run.name, several)
    stages = run.plan["stages"].items()
    yield opens(
        counted(len(stages), "stage", "stages"),
        table(["Stage", "Rank", "Parameters", "Share of FLOPs", "Modules"], _stages(stages), (0, 1, 2, 3)),
    )
    ranks = run.plan["memory"].items()
    yield opens(
        "Memory of a rank, as forecast",
        table(
            ["Pipeline rank", *(each.capitalize() for each in _PEAK), "During"],
            _like([_memory(rank) for rank in ranks]),
            range(10),
        ),
        note("At the peak of each rank; “during” is the action that reaches it."),
    )
    traffic = run.plan["network"].items()
    if any(rank["total"].number() for rank in traffic):
        kinds = _kinds(traffic)
        head = ["Pipeline rank", *(each.replace("_", "-").capitalize() for each in kinds)]
        rows = _like([tuple(memory(rank[kind].number()) for kind in kinds) for rank in traffic])
        yield opens("Bytes that a rank sends in a step", table(head, rows, range(len(head))))
    actions = run.plan["schedule"]["actions"].items()
    if len(actions) > 1:
        yield opens("Actions of each rank, in order", _actions(actions))


def _kinds(traffic: Sequence[Loose]) -> list[str]:
    """The kinds that every plan has, others that some rank sends, and the total."""
    used = [name for rank in traffic for name, value in rank.members().items() if value.number()]
    others = [name for name in dict.fromkeys(used) if name not in (*_TRAFFIC, "total")]
    return [*_TRAFFIC, *others, "total"]


def _stages(stages: Sequence[Loose]) -> list[list[str]]:
    total = sum(stage["flops_per_token"].number() or 0.0 for stage in stages) or 1.0
    rows = []
    for stage in stages:
        work = stage["flops_per_token"].number()
        rows.append(
            [
                count(stage["index"].number()),
                count(stage["owner"].number()),
                count(stage["parameters"].number()),
                share(None if work is None else work / total),
                _modules([module.string() or UNKNOWN for module in stage["modules"].items()]),
            ]
        )
    return rows


def _modules(names: Sequence[str]) -> str:
    """The names, a run of layers by its first and its last."""
    parts = []
    for is_layer, group in groupby(names, key=lambda name: name.startswith("layers.")):
        members = list(group)
        if is_layer and len(members) > 2:
            parts.append(f"{members[0]} … {members[-1]}")
        else:
            parts += members
    return ", ".join(parts)


def _memory(rank: Loose) -> tuple[str, ...]:
    peak = rank["at_peak"]
    total = rank["peak"].number()
    parts = [memory(peak[name].number()) for name in _PEAK if name != "total"]
    return (*parts, memory(total), peak["action"].string() or UNKNOWN)


def _like(rows: Sequence[tuple[str, ...]]) -> list[list[str]]:
    """A row for each stretch of ranks with the same cells, which ranks it is for in front."""
    shown = []
    for cells, group in groupby(enumerate(rows), key=lambda each: each[1]):
        ranks = [rank for rank, _ in group]
        name = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} … {ranks[-1]}"
        shown.append([name, *cells])
    return shown


def _actions(ranks: Sequence[Loose]) -> Html:
    lines = (f"rank {index}  {rank.string() or UNKNOWN}" for index, rank in enumerate(ranks))
    return element("pre", joined(lines, "\n"), class_="scroll")
