"""Optimizer steps of the real trainer, from a configuration, on forked ranks; for comparison with one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.distributed.ranks import run_ranks
from trainer.build import Pipeline, build_pipeline
from trainer.checkpoint.agreement import Ranks
from trainer.checkpoint.state import TrainState
from trainer.config.schema import Config
from trainer.data.build import build_loader
from trainer.data.tokenizer import load_tokenizer
from trainer.loop import Loop
from trainer.optimizer import build_lr_schedule, build_optimizer
from trainer.plan.plan import make_plan
from trainer.process import RankIdentity, RankProcess
from trainer.weights.initial import load_initial

Tables = Mapping[str, Mapping[str, Any]]

_BASE: Tables = {
    "model": {
        "override": {
            "dim": 32,
            "n_layers": 8,
            "n_heads": 4,
            "n_kv_heads": 2,
            "ffn_hidden": 48,
            "vocab_size": 258,
            "max_seq_len": 64,
        },
        "tokenizer_path": "byte",
    },
    "training": {
        "batch_size": 8,
        "seq_len": 16,
        "steps": 3,
        "warmup_steps": 1,
        "mixed_precision_param": "float32",
        "seed": 11,
        "dataset": "text",
    },
    "optimizer": {"lr": 1e-3},
}


def configuration(corpus: Path, tables: Tables) -> Config:
    """The tiny base configuration on a text file, with some tables' keys replaced."""
    merged = {name: dict(keys) for name, keys in _BASE.items()}
    merged["training"]["dataset_path"] = str(corpus)
    for name, keys in tables.items():
        merged.setdefault(name, {}).update(keys)
    return Config.model_validate(merged)


def write_corpus(folder: Path) -> Path:
    """Documents of unequal lengths, no two alike."""
    path = folder / "corpus.txt"
    path.write_text("\n".join(f"line {i} " + "abcdefgh"[i % 8] * (i % 23) + f" {i * i}" for i in range(900)))
    return path


@dataclass(frozen=True)
class Trainer:
    """This rank's running half of a job."""

    pipeline: Pipeline
    optimizer: torch.optim.Optimizer
    loop: Loop

    @property
    def parameters(self) -> list[tuple[str, Any]]:
        """Names and parameters of this rank's stages."""
        return [pair for stage in self.pipeline.stages.values() for pair in stage.module.named_parameters()]


@contextmanager
def trainer_of(rank: int, config: Config, world_size: int, record: Path) -> Iterator[Trainer]:
    """The trainer of one rank, built as the program builds it, until the end of the block."""
    plan = make_plan(config, world_size)
    with RankProcess(RankIdentity(rank, rank, world_size), config, plan, record) as process:
        pipeline = build_pipeline(config, plan, process, process.progress)
        optimizer = build_optimizer(pipeline.parts, config.optimizer, process.device)
        loader = build_loader(
            config,
            load_tokenizer("byte"),
            data_rank=plan.layout.data_rank(rank),
            data_ranks=plan.layout.data_ranks,
        )
        schedule = build_lr_schedule(optimizer, config)
        loop = Loop(config, plan, pipeline, optimizer, schedule, loader, process.device, process.progress)
        if config.checkpoint.initial_load_path is not None:
            state = TrainState(pipeline.parts, optimizer, schedule, loader, loop.counters)
            load_initial(config, plan.sizes, state, Ranks(), print)
        yield Trainer(pipeline, optimizer, loop)
        loader.close()


def train_steps(rank: int, config: Config, world_size: int, record: str) -> dict[str, Any]:
    """Run all steps; losses, norms, gradients of every step, and parameters at the start and at the end."""
    with trainer_of(rank, config, world_size, Path(record)) as trainer:
        gradients: list[dict[str, Any]] = []

        def keep_gradients(*_: Any) -> None:
            gradients.append({n: _whole(p.grad) for n, p in trainer.parameters})

        trainer.optimizer.register_step_pre_hook(keep_gradients)
        initial = {n: _whole(p) for n, p in trainer.parameters}
        results = [trainer.loop.train_step() for _ in range(config.training.steps)]
        return {
            "losses": [result.loss for result in results],
            "norms": [result.grad_norm for result in results],
            "lrs": [result.lr for result in results],
            "gradients": gradients,
            "initial": initial,
            "final": {n: _whole(p) for n, p in trainer.parameters},
            "buffers": {n: b.clone() for part in trainer.pipeline.parts for n, b in part.named_buffers()},
        }


def train(folder: Path, world_size: int, tables: Tables, timeout: float = 90.0) -> list[dict[str, Any]]:
    """What `train_steps` returns on every rank."""
    config = configuration(write_corpus(folder), tables)
    record = str(folder / "failure.json")
    return run_ranks(
        train_steps, world_size, config, world_size, record, timeout=timeout, process_group=False
    )


def merged(results: list[dict[str, Any]], key: str) -> dict[str, Any]:
    """One of the dictionaries by parameter name, of the whole model."""
    return {name: value for result in results for name, value in result[key].items()}


def assert_same_run(one: list[dict[str, Any]], many: list[dict[str, Any]]) -> None:
    """Losses to 1e-5, norms and every gradient to 1e-4; initial parameters bit for bit; on every rank."""
    for result in many:
        assert result["losses"] == many[0]["losses"]
        assert result["norms"] == many[0]["norms"]
    for expected, actual in zip(one[0]["losses"], many[0]["losses"], strict=True):
        assert abs(expected - actual) <= 1e-5 * abs(expected)
    for expected, actual in zip(one[0]["norms"], many[0]["norms"], strict=True):
        assert abs(expected - actual) <= 1e-4 * abs(expected)
    expected, actual = merged(one, "initial"), merged(many, "initial")
    assert expected.keys() == actual.keys()
    assert all((expected[name] == actual[name]).all() for name in expected)
    for step, gradients in enumerate(one[0]["gradients"]):
        parts = [{"g": result["gradients"][step]} for result in many]
        _assert_close(gradients, merged(parts, "g"), step)


def _assert_close(expected: Mapping[str, Any], actual: Mapping[str, Any], step: int) -> None:
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        reference = torch.as_tensor(value)
        difference = float((torch.as_tensor(actual[name]) - reference).norm())
        assert difference <= 1e-4 * float(reference.norm()) + 1e-9, (step, name, difference)


def _whole(tensor: Any) -> Any:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()
