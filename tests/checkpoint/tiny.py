"""A tiny model in stages, trained a few steps in any layout: what the checkpoint tests save and load."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch._dynamo  # imported lazily by FSDP and by optimizers, for seconds; forked ranks inherit it from here
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from trainer.checkpoint.filesystem import Root
from trainer.checkpoint.local import LocalRoot
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.state import TrainState, model_tensors, optimizer_tensors
from trainer.lr_schedule import LearningRateShape, Schedule

CPU = torch.device("cpu")
MODULES = ("tok_embeddings", "layers.0", "layers.1", "output")


class Norm(nn.Module):
    """A gain and a bias: parameters of one dimension, whose 3 elements no 2 ranks share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        self.bias = nn.Parameter(torch.empty(3))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5)
        self.norm = Norm()


class Stage(nn.Module):
    """The named modules of the model with their full names."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        super().__init__()
        if "tok_embeddings" in modules:
            self.tok_embeddings = nn.Embedding(7, 3)
        indices = [name.removeprefix("layers.") for name in modules if name.startswith("layers.")]
        self.layers = nn.ModuleDict({index: Block() for index in indices})
        if "output" in modules:
            self.output = nn.Linear(3, 7, bias=False)
        for name, parameter in self.named_parameters():
            parameter.data = value_of(name, parameter.shape)


@dataclass(frozen=True)
class Layout:
    """Pipeline stages times FSDP shards."""

    pipeline: int = 1
    shard: int = 1

    @property
    def text(self) -> str:
        return f"pipeline {self.pipeline}, shard {self.shard}"


class Position:
    """A data loader that only knows where it is."""

    def __init__(self, document: int = 0) -> None:
        self.document = document

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": 0, "document": self.document}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.document = state["document"]


class Run:
    """A rank's share of a run of the tiny model."""

    def __init__(self, layout: Layout, rank: int) -> None:
        self.layout = layout
        per_stage = len(MODULES) // layout.pipeline
        first = rank // layout.shard * per_stage
        stage = Stage(MODULES[first : first + per_stage])
        if layout.shard > 1:
            mesh = init_device_mesh(
                "cpu", (layout.pipeline, layout.shard), mesh_dim_names=("pipeline", "shard")
            )
            fully_shard(stage, mesh=mesh["shard"])
        optimizer = torch.optim.AdamW(stage.parameters(), lr=0.1, fused=True)
        schedule = Schedule(optimizer, 0.1, LearningRateShape(steps=20, warmup_steps=3))
        self.state = TrainState([stage], optimizer, schedule, Position(), {"tokens": 0})
        self.step = 0

    def train(self, steps: int = 1) -> None:
        """Updates with gradients that depend on the step and the parameter's name alone."""
        for _ in range(steps):
            self.step += 1
            for name, parameter in self.state.model_parts[0].named_parameters():
                parameter.grad = like(parameter, value_of(f"{self.step} {name}", parameter.shape))
            self.state.optimizer.step()
            self.state.schedule.step()
            self.state.data.document += 3
            self.state.counters["tokens"] += 64

    def snapshot(self) -> dict[str, Any]:
        """Every value of this rank's run: whole tensors by name, and numbers."""
        model = model_tensors(self.state.model_parts)
        optimizer = optimizer_tensors(self.state.model_parts, self.state.optimizer)
        return {
            "model": {name: whole(tensor) for name, tensor in model.items()},
            "optimizer": {name: whole(tensor) for name, tensor in optimizer.items()},
            "lr": self.state.schedule.lr,
            "document": self.state.data.document,
            "tokens": self.state.counters["tokens"],
        }


def value_of(name: str, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """Values that follow from the name alone."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest())
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def like(parameter: Tensor, values: Tensor) -> Tensor:
    """Values in the layout of a parameter."""
    if not isinstance(parameter, DTensor):
        return values
    return distribute_tensor(values, parameter.device_mesh, parameter.placements)


def whole(tensor: Tensor) -> np.ndarray:
    """A copy of all values of a tensor of any layout."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().numpy().copy()


def merge(snapshots: list[dict[str, Any]]) -> dict[str, Any]:
    """The run of all ranks as one: what the stages hold together."""
    merged: dict[str, Any] = {**snapshots[0], "model": {}, "optimizer": {}}
    for snapshot in snapshots:
        for section in ("model", "optimizer"):
            merged[section].update(snapshot[section])
        assert {key: snapshot[key] for key in ("lr", "document", "tokens")} == {
            key: merged[key] for key in ("lr", "document", "tokens")
        }
    return merged


def settings(**changed: Any) -> Any:
    """The table [checkpoint]."""
    defaults = {
        "enable_checkpoint": True,
        "interval": 2,
        "interval_type": "steps",
        "model_weights_only": False,
        "export_dtype": "float32",
        "keep_latest_k": 0,
        "load_step": -1,
        "exclude_from_loading": (),
        "async_mode": "disabled",
        "verify": "full",
    }
    return SimpleNamespace(**{**defaults, **changed})


def manager(folder: Path | Root, layout: Layout | None = None, **changed: Any) -> CheckpointManager:
    root = LocalRoot(folder) if isinstance(folder, Path) else folder
    return CheckpointManager(root, settings(**changed), layout=(layout or Layout()).text, device=CPU)
