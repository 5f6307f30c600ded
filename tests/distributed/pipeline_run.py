"""One pipeline step of a tiny Llama on forked ranks, and the same step in one process to compare it with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.initialize import initialize_parameters
from models.llama.model import Transformer
from models.llama.sizes import LLAMA3, LlamaSizes
from parallelisms.apply import apply_parallelisms
from parallelisms.data import Precision
from parallelisms.layout import Layout, Parallelism
from parallelisms.mesh import build_meshes
from parallelisms.pipeline.channels import Channels
from parallelisms.pipeline.execute import Boundary, Executor
from parallelisms.pipeline.factory import build_schedule
from parallelisms.pipeline.schedules.catalogue import find
from parallelisms.pipeline.setting import Costs, Setting
from parallelisms.pipeline.split import split_balanced
from parallelisms.pipeline.stage import Stage

SEQ_LEN = 8
TINY = replace(
    LLAMA3["debug"], dim=16, n_layers=9, n_heads=2, n_kv_heads=1, ffn_hidden=24, vocab_size=31, max_seq_len=64
)
CPU = torch.device("cpu")


class Record:
    """An observer that keeps what was done, in order."""

    def __init__(self) -> None:
        self.actions: list[str] = []

    def begin(self, action: Any) -> None:
        self.actions.append(str(action))

    def wait(self, action: Any, transfer: Any, peer: int) -> None: ...

    def ready(self, action: Any) -> None: ...

    def end(self, action: Any) -> None: ...


@dataclass(frozen=True)
class Case:
    """What is run: `batch` sequences with distinct labels for each data-parallel rank, `accumulation` times."""

    schedule: str
    pipeline: int
    microbatches: int
    stages_per_rank: int | None = None
    batch: int = 9
    shard: int = 1
    replicate: int = 1
    accumulation: int = 1
    checkpointing: str = "none"
    sizes: LlamaSizes = TINY
    masked_rows: int = 0  # rows at the start of the global batch in which no label counts


def global_batch(case: Case) -> tuple[Tensor, Tensor]:
    """Tokens and labels of the whole step, (rows, T)."""
    generator = torch.Generator().manual_seed(5)
    rows = case.batch * case.shard * case.replicate * case.accumulation
    tokens = torch.randint(0, case.sizes.vocab_size, (rows, SEQ_LEN), generator=generator)
    labels = torch.randint(0, case.sizes.vocab_size, (rows, SEQ_LEN), generator=generator)
    labels[:, -1] = torch.where(torch.arange(rows) % 3 == 0, -100, labels[:, -1])  # unequal counts per row
    labels[: case.masked_rows] = -100
    return tokens, labels


def loss_of(logits: Tensor, labels: Tensor, counted: Tensor) -> Tensor:
    total = F.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    return total / counted


def reference(case: Case) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Losses by data-parallel rank and microbatch, and gradients, of one process without a pipeline."""
    model = Transformer(case.sizes)
    initialize_parameters(model, seed=3)
    tokens, labels = global_batch(case)
    logits, counted = model(tokens), (labels != -100).sum()
    loss_of(logits, labels, counted).backward()
    data_ranks = case.shard * case.replicate
    losses: list[list[float]] = [[] for _ in range(data_ranks)]
    batches = zip(logits.detach().split(case.batch), labels.split(case.batch), strict=True)
    for position, (batch, targets) in enumerate(batches):
        for part, target in zip(batch.split(rows_of(case)), targets.split(rows_of(case)), strict=True):
            losses[position % data_ranks].append(float(loss_of(part, target, counted)))
    return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def rows_of(case: Case) -> list[int]:
    """Rows of each microbatch."""
    return [len(part) for part in torch.arange(case.batch).tensor_split(case.microbatches)]


def run_case(rank: int, case: Case) -> dict[str, Any]:
    """One step on this rank: its microbatch losses, gradients, actions done and planned, peak activations."""
    layout = Layout(case.pipeline, case.replicate, case.shard)
    meshes = build_meshes(layout, "cpu")
    pipeline_rank = layout.pipeline_rank(rank)
    family = find(case.schedule)
    placement = family.place(case.pipeline, case.stages_per_rank)
    sharded = layout.data_ranks > 1
    setting = Setting(placement, case.microbatches, Costs.equal(placement.stages))
    schedule = build_schedule(case.schedule, setting, sharded=sharded)
    names = case.sizes.modules()
    costs = [float(case.sizes.flops_per_token(SEQ_LEN, name)) for name in names]
    modules = split_balanced(names, costs, placement.stages).stages
    stages = {}
    for index in placement.stages_of(pipeline_rank):
        module: nn.Module = Transformer(case.sizes, modules[index])
        parallelism = Parallelism(sharded, keep_gathered=True, checkpointing=case.checkpointing)
        sharding = apply_parallelisms(module, meshes, parallelism, Precision())
        initialize_parameters(module, seed=3)
        last = index == placement.stages - 1
        stages[index] = Stage(
            index, module, last=last, split_backward=family.splits_backward, sharding=sharding
        )
    record = Record()
    members = layout.pipeline_of(rank)
    channels = Channels(schedule.actions, placement, members, pipeline_rank, CPU)
    boundary = Boundary(SEQ_LEN, case.sizes.dim, torch.float32, CPU)
    executor = Executor(schedule.actions, placement, pipeline_rank, stages, channels, boundary, record)
    losses = _run_steps(executor, case, layout.data_rank(rank), layout.data_ranks)
    return {
        "losses": losses,
        "data_rank": layout.data_rank(rank),
        "gradients": {n: _full(p.grad) for s in stages.values() for n, p in s.module.named_parameters()},
        "done": record.actions,
        "planned": [str(action) for action in schedule.actions[pipeline_rank]] * case.accumulation,
        "peak_held": executor.peak_held,
        "planned_peak": schedule.proof.peak_activations[pipeline_rank],
    }


def _run_steps(executor: Executor, case: Case, data_rank: int, data_ranks: int) -> list[float]:
    tokens, labels = global_batch(case)
    counted = (labels != -100).sum()
    rows = rows_of(case)
    losses: list[float] = []
    for step in range(case.accumulation):
        start = (step * data_ranks + data_rank) * case.batch
        inputs = tokens[start : start + case.batch].split(rows)
        targets = labels[start : start + case.batch].split(rows)
        loss = lambda logits, k, targets=targets: loss_of(logits, targets[k], counted)  # noqa: E731
        last = step == case.accumulation - 1
        losses += [float(value) for value in executor.run(inputs, loss, last_accumulation=last)]
    return losses


def _full(gradient: Any) -> Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def run_cases(rank: int, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Many cases in one set of processes."""
    return [run_case(rank, case) for case in cases]


def assert_equals_one_process(case: Case, results: Sequence[dict[str, Any]]) -> None:
    """Each microbatch's loss to 1e-5 relative, every gradient to 1e-4 of its norm, same actions as planned."""
    losses, gradients = reference(case)
    merged: dict[str, Any] = {}
    for rank_losses, data_rank in ((r["losses"], r["data_rank"]) for r in results if r["losses"]):
        for actual, expected in zip(rank_losses, losses[data_rank], strict=True):
            assert abs(actual - expected) <= 1e-5 * abs(expected), (case, rank_losses, losses)
    assert sum(bool(result["losses"]) for result in results) == len(losses), case
    for result in results:
        merged.update(result["gradients"])
        assert result["done"] == result["planned"], case
        assert result["peak_held"] == result["planned_peak"], case
    assert merged.keys() == gradients.keys(), case
    for name, expected in gradients.items():
        difference = float((torch.as_tensor(merged[name]) - expected).norm())
        assert difference <= 1e-4 * float(expected.norm()) + 1e-9, (case, name, difference)
