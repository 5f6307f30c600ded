"""Configurations for tests of the plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.config.schema import Config


def config(flavor: str = "debug", **tables: Mapping[str, Any]) -> Config:
    """Llama 3 of a flavor, with the keys of some tables."""
    return Config.model_validate({"model": {"name": "llama3", "flavor": flavor}, **tables})


def llama_405b(**experimental: Any) -> Config:
    """Llama 3 405B in pipelines of 64 with 128 microbatches."""
    return config(
        "405B",
        training={"batch_size": 128, "seq_len": 4096},
        experimental={
            "pipeline_parallel_degree": 64,
            "pipeline_parallel_microbatches": 128,
            **experimental,
        },
        activation_checkpoint={"mode": "full"},
    )
