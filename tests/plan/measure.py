"""Measures on real ranks what the plan predicts: state, activations, what is alive, what is sent."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.layers.sequences import Sequences
from parallelisms.tensor import sum_gradients_of_whole_parameters
from tests.distributed.ranks import run_ranks
from trainer.build import Pipeline, build_pipeline
from trainer.config.schema import Config
from trainer.loss import loss_of_microbatches
from trainer.optimizer import build_optimizer
from trainer.plan.plan import Plan, make_plan
from trainer.process import RankIdentity, RankProcess

DEBUG: Mapping[str, Any] = {"batch_size": 4, "seq_len": 32, "mixed_precision_param": "float32"}


@dataclass
class Measured:
    """Of one rank, in bytes.

    `activations` is the most that autograd kept at once, `alive` the most of everything that the step made, and
    `collectives` the size of the first tensor of every collective, by its name.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    alive: int
    collectives: Mapping[str, int]


def debug_config(tables: Mapping[str, Mapping[str, Any]]) -> Config:
    """The debug model on short sequences, with some tables' keys replaced."""
    merged = {name: dict(keys) for name, keys in tables.items()}
    merged["training"] = {**DEBUG, **merged.get("training", {})}
    merged.setdefault("model", {})["tokenizer_path"] = "byte"
    return Config.model_validate(merged)


def measure(config: Config, world_size: int, folder: Path) -> list[Measured]:
    """Run one step on every rank."""
    record = str(folder / "failure.json")
    return run_ranks(_measure_rank, world_size, config, world_size, record, process_group=False)


def _measure_rank(rank: int, config: Config, world_size: int, record: str) -> Measured:
    plan = make_plan(config, world_size)
    with RankProcess(RankIdentity(rank, rank, world_size), config, plan, Path(record)) as process:
        pipeline = build_pipeline(config, plan, process, process.progress)
        optimizer = build_optimizer(pipeline.parts, config.optimizer, process.device)
        if plan.parallelism.sharded:
            run_step(config, plan, pipeline)  # FSDP makes its buffers in the first step
        optimizer.zero_grad(set_to_none=True)
        saved, collectives = SavedTensors(pipeline.parts), Collectives()
        with Alive() as alive, collectives, saved:
            run_step(config, plan, pipeline)
        optimizer.step()
        parameters = [p for part in pipeline.parts for p in part.parameters()]
        moments = [value for entry in optimizer.state.values() for value in entry.values()]
        return Measured(
            parameters=sum(map(local_bytes, parameters)),
            gradients=sum(local_bytes(p.grad) for p in parameters if p.grad is not None),
            optimizer=sum(map(local_bytes, moments)),
            activations=saved.most,
            alive=alive.most,
            collectives=dict(collectives.bytes),
        )


def run_step(config: Config, plan: Plan, pipeline: Pipeline) -> None:
    """All runs of the schedule of one step, with random tokens."""
    vocabulary = plan.sizes.vocab_size
    for run in range(plan.accumulation):
        tokens = [torch.randint(vocabulary, (rows, plan.seq_len)) for rows in plan.rows]
        loss = loss_of_microbatches(tokens, torch.tensor(plan.tokens_per_step), pipeline.vocabulary)
        last = run == plan.accumulation - 1
        sequences = None
        if config.data.mask_documents:
            documents = torch.arange(plan.seq_len, dtype=torch.int32) // 7
            sequences = [Sequences.packed(documents.expand(rows, -1)) for rows in plan.rows]
        pipeline.executor.run(tokens, loss, sequences=sequences, last_accumulation=last)
    if plan.layout.tensor > 1:
        parameters = [parameter for part in pipeline.parts for parameter in part.parameters()]
        sum_gradients_of_whole_parameters(parameters, pipeline.meshes.tensor)


def local_bytes(tensor: Tensor) -> int:
    """Of this rank's part."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.nbytes


class Alive(TorchDispatchMode):
    """Bytes of the storages that were made under it and are not gone yet."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {s._cdata for s in _storages((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        for storage in _storages(result):
            key = storage._cdata
            if key in before or key in self._known:
                continue
            self._known.add(key)
            self.bytes += storage.nbytes()
            self.most = max(self.most, self.bytes)
            weakref.finalize(storage, self._gone, key, storage.nbytes())
        return result

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.bytes -= size


class SavedTensors(torch.autograd.graph.saved_tensors_hooks):
    """Bytes of what autograd keeps, each storage once, parameters left out; `most` at any time."""

    def __init__(self, parts: list[nn.Module]) -> None:
        self.most = 0
        self._bytes = 0
        self._uses: Counter[int] = Counter()
        self._parts = parts
        super().__init__(self._pack, lambda kept: kept.tensor)

    def _pack(self, tensor: Tensor) -> _Kept:
        storage = tensor.untyped_storage()
        parameters = {
            _local(p).untyped_storage().data_ptr() for part in self._parts for p in part.parameters()
        }
        if storage.data_ptr() in parameters:
            return _Kept(tensor.detach())
        return _Kept(tensor.detach(), self)

    def use(self, tensor: Tensor, change: int) -> None:
        storage = tensor.untyped_storage()
        before = self._uses[storage.data_ptr()]
        self._uses[storage.data_ptr()] += change
        if (before > 0) != (before + change > 0):
            self._bytes += change * storage.nbytes()
            self.most = max(self.most, self._bytes)


@dataclass
class _Kept:
    tensor: Tensor
    owner: SavedTensors | None = field(default=None)

    def __post_init__(self) -> None:
        if self.owner is not None:
            self.owner.use(self.tensor, 1)

    def __del__(self) -> None:
        if self.owner is not None:
            self.owner.use(self.tensor, -1)


class Collectives(TorchDispatchMode):
    """Bytes of the first tensor of every collective: what is gathered into, reduced into, or summed."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name()
        if name.startswith(("c10d::", "_c10d_functional::")):
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            self.bytes[name.partition("::")[2]] += sum(tensor.nbytes for tensor in tensors[:1])
        return function(*args, **(kwargs or {}))


def _local(parameter: Any) -> Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def _storages(values: Any) -> list[torch.UntypedStorage]:
    return [
        leaf.untyped_storage()
        for leaf in tree_leaves(values)
        if isinstance(leaf, Tensor) and type(leaf) in (Tensor, nn.Parameter)
    ]
