"""How many processes a configuration asks for on one machine. No torch."""

from __future__ import annotations

from trainer.config.machine import visible_gpus
from trainer.config.schema import Config


def processes_needed(config: Config) -> int:
    """Processes to start on this machine when nobody says how many: one for each GPU, or, on a machine with
    none, as many as the configured degrees need (a shard degree of -1 counts as 1)."""
    return visible_gpus() or degrees_product(config)


def degrees_product(config: Config) -> int:
    """Ranks that the configured degrees make together, with a shard degree of -1 as 1."""
    training = config.training
    shard = max(1, training.data_parallel_shard_degree)
    experimental = config.experimental
    inner = experimental.context_parallel_degree * training.tensor_parallel_degree
    return experimental.pipeline_parallel_degree * training.data_parallel_replicate_degree * shard * inner
