"""The parity matrix: which layouts are compared with one process, and layouts drawn at random."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, islice
from pathlib import Path
from typing import Any

from parallelisms.pipeline.schedules.catalogue import FAMILIES, find
from trainer.config.rules import check
from trainer.config.schema import Config

BATCH = 8  # sequences of a step, in every layout
SEQ_LEN = 32
DIMENSIONS = ("pipeline", "replicate", "shard", "context", "tensor", "expert")

_MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama3": {"dim": 32, "n_heads": 4, "n_kv_heads": 2, "ffn_hidden": 48},
    "qwen3_moe": {
        "dim": 32,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 8,
        "expert_hidden": 24,
        "n_experts": 8,
        "n_experts_per_token": 2,
    },
    "deepseek_v3": {
        "dim": 32,
        "n_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "ffn_hidden": 48,
        "expert_hidden": 16,
        "n_experts": 8,
        "n_experts_per_token": 2,
        "n_expert_groups": 4,
        "n_groups_per_token": 2,
    },
}
MIXTURES = ("qwen3_moe", "deepseek_v3")
_SIZES_OF_ALL = {"vocab_size": 264, "max_seq_len": 64}


@dataclass(frozen=True)
class Trial:
    """A layout and what else is switched on in it. Every step has the same BATCH sequences."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    model: str = "llama3"
    schedule: str = "1F1B"
    microbatches: int = 1
    accumulation: int = 1
    checkpointing: str = "none"  # or "full", or an option of selective checkpointing
    compiled: bool = False
    more: tuple[tuple[str, Any], ...] = ()  # further keys, as "table.key"
    quick: bool = False

    @property
    def world_size(self) -> int:
        return self.pipeline * self.replicate * self.shard * self.context * self.tensor

    @property
    def dimensions(self) -> frozenset[str]:
        """Those that are used."""
        return frozenset(name for name in DIMENSIONS if getattr(self, name) > 1)

    @property
    def name(self) -> str:
        parts = [f"{name} {getattr(self, name)}" for name in DIMENSIONS if name in self.dimensions]
        if self.pipeline > 1 or self.schedule != "1F1B":
            parts.append(self.schedule)
        if self.microbatches > 1:
            parts.append(f"{self.microbatches} microbatches")
        if self.accumulation > 1:
            parts.append(f"accumulation {self.accumulation}")
        if self.checkpointing != "none":
            parts.append(f"checkpointing {self.checkpointing}")
        if self.compiled:
            parts.append("compiled")
        parts += [f"{key.rpartition('.')[2]} {value}" for key, value in self.more]
        return f"{self.model}: {', '.join(parts) or 'one process'}"

    @property
    def layers(self) -> int:
        """One for each stage, and at least two."""
        stages = self.pipeline * find(self.schedule).default_stages_per_rank if self.pipeline > 1 else 1
        return max(2, stages)

    @property
    def reference(self) -> Trial:
        """The same model in one process, the whole batch at once."""
        same = tuple((key, value) for key, value in self.more if key.startswith(("model.", "optimizer.")))
        return Trial(model=self.model, more=(*same, ("model.override.n_layers", self.layers)))

    def config(self, corpus: Path) -> Config:
        """What the layout is configured by, on a text file."""
        return Config.model_validate(self._tables(corpus))

    def _tables(self, corpus: Path) -> dict[str, dict[str, Any]]:
        tables: dict[str, dict[str, Any]] = {
            "model": {
                "name": self.model,
                "flavor": "debug",
                "override": {"n_layers": self.layers, **_SIZES_OF_ALL, **_MODELS[self.model]},
                "tokenizer_path": "byte",
            },
            "training": {
                "batch_size": BATCH // (self.replicate * self.shard * self.accumulation),
                "global_batch_size": BATCH,
                "seq_len": SEQ_LEN,
                "steps": 3,
                "warmup_steps": 1,
                "mixed_precision_param": "float32",
                "seed": 11,
                "dataset": "text",
                "dataset_path": str(corpus),
                "data_parallel_replicate_degree": self.replicate,
                "data_parallel_shard_degree": self.shard,
                "tensor_parallel_degree": self.tensor,
            },
            "experimental": {
                "pipeline_parallel_degree": self.pipeline,
                "pipeline_parallel_schedule": self.schedule,
                "pipeline_parallel_microbatches": self.microbatches,
                "context_parallel_degree": self.context,
                "expert_parallel_degree": self.expert,
            },
            "activation_checkpoint": self._checkpointing(),
            "optimizer": {"lr": 1e-3},
            "comm": {"init_timeout_seconds": 120, "train_timeout_seconds": 60},
        }
        if self.compiled:
            tables["training"] |= {"compile": True, "compile_backend": "aot_eager"}
        if self.model in MIXTURES:
            tables["training"] |= {"load_balance_loss": 0.01}
        for key, value in self.more:
            _set(tables, key, value)
        return tables

    def _checkpointing(self) -> dict[str, Any]:
        if self.checkpointing in ("none", "full"):
            return {"mode": self.checkpointing}
        return {"mode": "selective", "selective_ac_option": self.checkpointing}


def _set(tables: dict[str, Any], key: str, value: Any) -> None:
    *path, name = key.split(".")
    for part in path:
        tables = tables.setdefault(part, {})
    tables[name] = value


FULL: dict[str, Any] = {"checkpointing": "full"}
BY_OPERATION: dict[str, Any] = {"checkpointing": "op"}
QWEN: dict[str, Any] = {"model": "qwen3_moe"}
DEEPSEEK: dict[str, Any] = {"model": "deepseek_v3"}
RING = (("experimental.context_parallel_rotate_method", "alltoall"),)
ULYSSES = (("experimental.context_parallel_rotate_method", "ulysses"),)
CONTIGUOUS = (("experimental.context_parallel_load_balancer", "none"),)
GATHERED_LOGITS = (("training.disable_loss_parallel", True),)
DOCUMENTS = (("data.mask_documents", True),)

LAYOUTS: tuple[Trial, ...] = (
    # One process: what else can change without any other rank.
    Trial(microbatches=3, accumulation=2, quick=True),
    Trial(checkpointing="2", accumulation=4),
    Trial(**BY_OPERATION, compiled=True),
    Trial(**QWEN, microbatches=2, accumulation=2, **FULL),
    Trial(**DEEPSEEK, microbatches=3, **BY_OPERATION),
    Trial(**DEEPSEEK, compiled=True, **FULL),
    # Two ranks: each dimension alone.
    Trial(pipeline=2, microbatches=3, quick=True),
    Trial(pipeline=2, schedule="ZBVZeroBubble", microbatches=4, **FULL),
    Trial(pipeline=2, schedule="GPipe", microbatches=4, accumulation=2, compiled=True),
    Trial(**QWEN, pipeline=2, schedule="ZB-H1", microbatches=3),
    Trial(**DEEPSEEK, pipeline=2, schedule="Interleaved1F1B", microbatches=2, **FULL),
    Trial(replicate=2, accumulation=2, compiled=True),
    Trial(**DEEPSEEK, replicate=2, microbatches=2),
    Trial(shard=2, microbatches=2, **FULL, quick=True),
    Trial(shard=2, accumulation=4, compiled=True),
    Trial(tensor=2, microbatches=2, quick=True),
    Trial(tensor=2, accumulation=2, **FULL, compiled=True),
    Trial(tensor=2, more=GATHERED_LOGITS),
    Trial(**DEEPSEEK, tensor=2, accumulation=2),
    Trial(context=2, microbatches=2, **FULL, quick=True),
    Trial(context=2, more=RING, compiled=True),
    Trial(context=2, more=(*ULYSSES, *DOCUMENTS), accumulation=2),
    Trial(**DEEPSEEK, context=2, more=CONTIGUOUS),
    Trial(**QWEN, shard=2, expert=2, microbatches=2, quick=True),
    Trial(**DEEPSEEK, shard=2, expert=2, accumulation=2, **FULL),
    Trial(**QWEN, shard=2, expert=2, compiled=True),
    Trial(**QWEN, shard=2, expert=2, **BY_OPERATION),
    # Four ranks: every two dimensions.
    Trial(pipeline=4, schedule="Interleaved1F1B", microbatches=4),
    Trial(pipeline=2, replicate=2, schedule="DualPipeV", microbatches=2),
    Trial(pipeline=2, shard=2, schedule="ZBVZeroBubble", microbatches=2, accumulation=2),
    Trial(pipeline=2, tensor=2, schedule="ZB-H1", microbatches=3, **FULL),
    Trial(**QWEN, pipeline=2, tensor=2, schedule="Interleaved1F1B", microbatches=2),
    Trial(pipeline=2, context=2, schedule="Interleaved1F1B", microbatches=3, more=RING),
    Trial(**QWEN, pipeline=2, shard=2, expert=2, schedule="ZBVZeroBubble", microbatches=3),
    Trial(**DEEPSEEK, pipeline=2, context=2, expert=2, schedule="ZB-H1", microbatches=2, **FULL),
    Trial(replicate=2, shard=2, microbatches=2, **FULL),
    Trial(**QWEN, replicate=2, tensor=2, accumulation=2),
    Trial(replicate=2, context=2, more=DOCUMENTS),
    Trial(**DEEPSEEK, replicate=2, shard=2, expert=2),
    Trial(shard=2, tensor=2, microbatches=2, **BY_OPERATION),
    Trial(shard=2, context=2, more=ULYSSES),
    Trial(**QWEN, shard=4, expert=2, accumulation=2),
    Trial(**DEEPSEEK, shard=4, expert=4, microbatches=2),
    Trial(context=2, tensor=2, **FULL),
    Trial(context=4, microbatches=2, more=RING),
    Trial(**QWEN, context=2, expert=2, tensor=2),
    Trial(**DEEPSEEK, shard=2, tensor=2, expert=2, accumulation=2, **FULL),
    Trial(tensor=4),
    # Eight ranks: three dimensions.
    Trial(pipeline=2, replicate=2, shard=2, microbatches=2, schedule="InterleavedZeroBubble"),
    Trial(pipeline=4, shard=2, schedule="V-Half", microbatches=4, **FULL),
    Trial(pipeline=2, shard=2, tensor=2, microbatches=2, schedule="ZBVZeroBubble", **FULL),
    Trial(pipeline=2, context=2, tensor=2, microbatches=2, more=RING),
    Trial(pipeline=2, shard=2, context=2, schedule="V-Min", microbatches=2),
    Trial(replicate=2, shard=2, tensor=2, accumulation=2),
    Trial(shard=2, context=2, tensor=2),
    Trial(**QWEN, pipeline=2, shard=4, expert=2, schedule="Interleaved1F1B", accumulation=2),
    Trial(**DEEPSEEK, pipeline=2, shard=2, tensor=2, expert=2, schedule="ZB-H1", microbatches=2),
    Trial(**QWEN, shard=2, context=2, tensor=2, expert=4, **FULL),
    Trial(**DEEPSEEK, replicate=2, shard=2, context=2, expert=4),
)


def pairs(trials: tuple[Trial, ...]) -> set[frozenset[str]]:
    """Every two dimensions that some trial uses together."""
    return {frozenset(pair) for trial in trials for pair in combinations(sorted(trial.dimensions), 2)}


def draw(seed: int, count: int) -> tuple[Trial, ...]:
    """Layouts at random, all different, that the rules of the configuration allow."""
    generator = random.Random(seed)
    trials: dict[str, Trial] = {}
    for trial in islice(_candidates(generator), 100 * count):
        if not check(trial.config(Path("corpus.txt")), trial.world_size):
            trials.setdefault(trial.name, trial)
        if len(trials) == count:
            break
    return tuple(trials.values())


def _candidates(generator: random.Random) -> Iterator[Trial]:
    schedules = [family.name for family in FAMILIES]
    while True:
        degrees = dict.fromkeys(DIMENSIONS, 1)
        for _ in range(generator.choice((1, 2, 2, 3))):  # world sizes 2, 4 and 8
            name = generator.choice(DIMENSIONS[:-1])
            degrees[name] *= 2
        degrees["expert"] = generator.choice((1, 2, 2, 4))
        model = generator.choice(tuple(_MODELS))
        if model not in MIXTURES:
            degrees["expert"] = 1
        rows = BATCH // (degrees["replicate"] * degrees["shard"])
        accumulation = generator.choice([a for a in (1, 1, 2, 4) if rows % a == 0])
        yield Trial(
            **degrees,
            model=model,
            schedule=generator.choice(schedules) if degrees["pipeline"] > 1 else "1F1B",
            microbatches=generator.randint(1, rows // accumulation),
            accumulation=accumulation,
            checkpointing=generator.choice(("none", "full", "2", "op")),
        )
