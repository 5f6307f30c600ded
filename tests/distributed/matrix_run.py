"""Runs many layouts in few forks, and compares each with one process: on the ranks, without gathering anything.

Every rank has the reference in memory, which it inherits from the process that forks it, and compares its own
shards with the same parts of the whole tensors. What a rank found goes into a file, so that it is there if a later
layout kills the ranks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.distributed.layouts import Trial
from tests.distributed.ranks import RankError, run_ranks
from tests.distributed.training_run import train_steps, trainer_of, write_corpus
from trainer.config.schema import Config
from trainer.ports import free_port

LOSS, GRADIENT = 1e-5, 1e-4  # relative
_NOTHING = 1e-9  # a norm below which a gradient is rounding error alone


def run_matrix(trials: Sequence[Trial], folder: Path) -> dict[Trial, str]:
    """What differs first from one process in each layout; an empty text: nothing."""
    found: dict[Trial, str] = {}
    for world_size in sorted({trial.world_size for trial in trials}):
        left = [trial for trial in trials if trial.world_size == world_size]
        while left:
            verdicts = _run_fork(left, world_size, Path(mkdtemp(dir=folder)))
            found.update(zip(left, verdicts, strict=False))
            left = left[len(verdicts) :]
    return found


@cache
def _corpus() -> Path:
    return write_corpus(Path(mkdtemp()))


@cache
def _reference(trial: Trial) -> dict[str, Any]:
    """One process: losses, norms, whole parameters and gradients by name."""
    record = str(Path(mkdtemp()) / "failure.json")
    (result,) = run_ranks(
        train_steps, 1, trial.config(_corpus()), 1, record, timeout=120, process_group=False
    )
    return {key: _tensors(value) for key, value in result.items()}


def _tensors(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: torch.as_tensor(each) for name, each in value.items()}
    return [_tensors(each) for each in value] if isinstance(value, list) else value


def _run_fork(trials: Sequence[Trial], world_size: int, folder: Path) -> list[str]:
    """Verdicts of the layouts up to the first that killed the ranks, that one included."""
    configs = [trial.config(_corpus()) for trial in trials]
    references = [_reference(trial.reference) for trial in trials]
    ports = [free_port() for _ in trials]
    limit = 60.0 + 40 * len(trials)
    arguments = (world_size, configs, references, ports, folder)
    try:
        run_ranks(_run_rank, world_size, *arguments, timeout=limit, process_group=False)
    except RankError as error:
        complete = [n for n in range(len(trials)) if len(_reports(folder, n)) == world_size]
        failed = len(complete)
        record = folder / f"{failed}.failure.json"
        cause = json.loads(record.read_text()) if record.exists() else {"stack": "", "reason": str(error)}
        verdicts = [_judge(references[n], _reports(folder, n)) for n in complete]
        return [*verdicts, f"{cause['stack']}\n{cause['reason']}"]
    return [_judge(reference, _reports(folder, n)) for n, reference in enumerate(references)]


def _reports(folder: Path, position: int) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{position}-*.json"))]


def _run_rank(
    rank: int,
    world_size: int,
    configs: Sequence[Config],
    references: Sequence[dict[str, Any]],
    ports: Sequence[int],
    folder: Path,
) -> None:
    for position, (config, reference) in enumerate(zip(configs, references, strict=True)):
        os.environ["MASTER_PORT"] = str(ports[position])
        record = folder / f"{position}.failure.json"
        report = _report(rank, world_size, config, reference, record)
        (folder / f"{position}-{rank}.json").write_text(json.dumps(report))


def _report(
    rank: int, world_size: int, config: Config, reference: dict[str, Any], record: Path
) -> dict[str, Any]:
    """Losses and norms of this rank, and how far its shards are from the reference's: squares by name."""
    with trainer_of(rank, config, world_size, record) as trainer:
        initial = {n: _distance(p, reference["initial"].get(n)) for n, p in trainer.parameters}
        gradients: list[dict[str, float]] = []

        def compare_gradients(*_: Any) -> None:
            expected = reference["gradients"][len(gradients)]
            gradients.append({n: _distance(p.grad, expected.get(n)) for n, p in trainer.parameters})

        trainer.optimizer.register_step_pre_hook(compare_gradients)
        results = [trainer.loop.train_step() for _ in range(config.training.steps)]
        buffers = {
            n: _distance(b, reference["buffers"].get(n))
            for part in trainer.pipeline.parts
            for n, b in part.named_buffers()
        }
        return {
            "losses": [result.loss for result in results],
            "norms": [result.grad_norm for result in results],
            "initial": initial,
            "gradients": gradients,
            "buffers": buffers,
            "elements": {n: _own_elements(p) for n, p in trainer.parameters},
        }


def _distance(tensor: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    """The squared distance of this rank's part from the same part of the expected tensor."""
    if tensor is None or expected is None or tensor.shape != expected.shape:
        return float("inf")
    if isinstance(tensor, DTensor):
        mesh, placements = tensor.device_mesh, tensor.placements
        expected = distribute_tensor(expected, mesh, placements, src_data_rank=None).to_local()
        tensor = tensor.to_local()
    return float((tensor.detach().double() - expected.double()).square().sum())


def _own_elements(parameter: torch.Tensor) -> float:
    """Elements on this rank, each divided by the number of ranks that hold it."""
    if not isinstance(parameter, DTensor):
        return parameter.numel()
    mesh = parameter.device_mesh
    copies = 1
    for dimension, placement in enumerate(parameter.placements):
        copies *= mesh.size(dimension) if placement.is_replicate() else 1
    return parameter.to_local().numel() / copies


def _judge(reference: dict[str, Any], reports: Sequence[dict[str, Any]]) -> str:
    """The first quantity that differs, in the order in which it comes into being; empty if none does."""
    for name, whole in reference["initial"].items():
        distances = [report["initial"][name] for report in reports if name in report["initial"]]
        held = sum(report["elements"].get(name, 0) for report in reports)
        holders = max(1, round(held / whole.numel()))  # two stages hold a tied embedding
        if round(held, 3) != holders * whole.numel():
            return f"the ranks hold {held:g} of the {whole.numel()} elements of {name}"
        if any(distances):
            return f"initial {name}: not the same numbers"
    known = reference["initial"].keys() | reference["buffers"].keys()
    for report in reports:
        if unknown := (report["initial"].keys() | report["buffers"].keys()) - known:
            return f"{', '.join(sorted(unknown))}: not in the model of one process"
    for step, gradients in enumerate(reference["gradients"]):
        for what, limit in (("losses", LOSS), ("norms", GRADIENT)):
            expected = reference[what][step]
            values = {report[what][step] for report in reports}
            if len(values) > 1:
                return f"step {step + 1}: the ranks' {what} are {sorted(values)}"
            if not abs(values.pop() - expected) <= limit * abs(expected):
                return f"step {step + 1}: {what} {reports[0][what][step]!r}, in one process {expected!r}"
        for name, gradient in gradients.items():
            squares = [report["gradients"][step].get(name, 0.0) for report in reports]
            distance, norm = sum(squares) ** 0.5, float(gradient.double().norm())
            if not distance <= GRADIENT * norm + _NOTHING:
                return f"step {step + 1}: gradient of {name}: {distance:.2e} away, its norm is {norm:.2e}"
    for name in reference["buffers"]:
        if any(report["buffers"].get(name, 0.0) > _NOTHING for report in reports):
            return f"at the end: buffer {name}"
    return ""
