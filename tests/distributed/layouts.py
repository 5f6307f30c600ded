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
    "dense": {
        "name": "llama3",
        "flavor": "debug",
        "override": {"dim": 32, "n_heads": 4, "n_kv_heads": 2, "ffn_hidden": 48},
    },
}
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
    model: str = "dense"
    schedule: str = "1F1B"
    microbatches: int = 1
    accumulation: int = 1
    checkpointing: str = "none"
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
            parts.append(f"{self.checkpointing} checkpointing")
        if self.compiled:
            parts.append("compiled")
        parts += [f"{key} {value}" for key, value in self.more]
        return f"{self.model}: {', '.join(parts) or 'one process'}"

    @property
    def layers(self) -> int:
        """Enough for the stages; few otherwise."""
        stages = self.pipeline * find(self.schedule).default_stages_per_rank
        return 8 if self.pipeline > 1 and stages > 4 else 4

    @property
    def reference(self) -> Trial:
        """The same model in one process, the whole batch at once."""
        same = tuple((key, value) for key, value in self.more if key.startswith("model."))
        return Trial(model=self.model, more=(*same, ("model.override.n_layers", self.layers)))

    def config(self, corpus: Path) -> Config:
        """What the layout is configured by, on a text file."""
        return Config.model_validate(self._tables(corpus))

    def _tables(self, corpus: Path) -> dict[str, dict[str, Any]]:
        model = _MODELS[self.model]
        tables: dict[str, dict[str, Any]] = {
            "model": {
                **model,
                "override": {"n_layers": self.layers, **_SIZES_OF_ALL, **model["override"]},
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
            "activation_checkpoint": {"mode": self.checkpointing},
            "optimizer": {"lr": 1e-3},
            "comm": {"init_timeout_seconds": 120, "train_timeout_seconds": 60},
        }
        if self.compiled:
            tables["training"]["compile"] = True
        for key, value in self.more:
            _set(tables, key, value)
        return tables


def _set(tables: dict[str, Any], key: str, value: Any) -> None:
    *path, name = key.split(".")
    for part in path:
        tables = tables.setdefault(part, {})
    tables[name] = value


FULL = {"checkpointing": "full"}

LAYOUTS: tuple[Trial, ...] = (
    # One process: what else can change without any other rank.
    Trial(microbatches=3, accumulation=2, quick=True),
    Trial(checkpointing="selective", accumulation=4),
    # Two ranks.
    Trial(pipeline=2, microbatches=3, quick=True),
    Trial(pipeline=2, schedule="ZBVZeroBubble", microbatches=4, **FULL, quick=True),
    Trial(pipeline=2, schedule="GPipe", microbatches=4, accumulation=2),
    Trial(replicate=2, accumulation=2),
    Trial(shard=2, microbatches=2, **FULL, quick=True),
    Trial(shard=2, accumulation=4),
    # Four ranks.
    Trial(pipeline=4, schedule="Interleaved1F1B", microbatches=4),
    Trial(pipeline=4, schedule="ZB-H1", microbatches=5, **FULL),
    Trial(pipeline=2, shard=2, schedule="ZBVZeroBubble", microbatches=2, accumulation=2, quick=True),
    Trial(pipeline=2, shard=2, schedule="Interleaved1F1B", microbatches=3),
    Trial(pipeline=2, replicate=2, schedule="DualPipeV", microbatches=2),
    Trial(replicate=2, shard=2, microbatches=2, **FULL),
    # Eight ranks.
    Trial(pipeline=2, replicate=2, shard=2, microbatches=2, schedule="InterleavedZeroBubble"),
    Trial(pipeline=4, shard=2, schedule="V-Half", microbatches=4, **FULL),
)


def pairs(trials: tuple[Trial, ...]) -> set[frozenset[str]]:
    """Every two dimensions that some trial uses together."""
    return {frozenset(pair) for trial in trials for pair in combinations(sorted(trial.dimensions), 2)}


def draw(seed: int, count: int) -> tuple[Trial, ...]:
    """Layouts at random, all different, that the rules of the configuration allow."""
    generator = random.Random(seed)
    allowed = (
        trial
        for trial in islice(_candidates(generator), 100 * count)
        if not check(trial.config(Path("corpus.txt")), trial.world_size)
    )
    trials = {trial.name: trial for trial in allowed}
    return tuple(trials.values())[:count]


def _candidates(generator: random.Random) -> Iterator[Trial]:
    schedules = [family.name for family in FAMILIES]
    while True:
        degrees = dict.fromkeys(DIMENSIONS, 1)
        for _ in range(generator.choice((1, 2, 2, 3, 3))):  # world sizes 2, 4 and 8
            name = generator.choice(("pipeline", "replicate", "shard"))
            degrees[name] *= 2
        degrees["expert"] = 1
        model = generator.choice(tuple(_MODELS))
        if model == "dense":
            degrees["expert"] = 1
        rows = BATCH // (degrees["replicate"] * degrees["shard"])
        accumulation = generator.choice([a for a in (1, 1, 2, 4) if rows % a == 0])
        yield Trial(
            **degrees,
            model=model,
            schedule=generator.choice(schedules) if degrees["pipeline"] > 1 else "1F1B",
            microbatches=generator.randint(1, rows // accumulation),
            accumulation=accumulation,
            checkpointing=generator.choice(("none", "full", "selective")),
        )
