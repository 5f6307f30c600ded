"""How many processes a configuration asks for on one machine. No torch."""

from __future__ import annotations

from trainer.config.machine import visible_gpus
from trainer.config.schema import Config


def processes_needed(config: Config) -> int:
    """Processes to start on this machine when nobody says how many: one for each GPU, or, on a machine with
    none, as many as the configured degrees need (a shard degree of -1 counts as little as it can)."""
    return visible_gpus() or degrees_product(config)


def degrees_product(config: Config) -> int:
    """Ranks that the configured degrees make together, with a shard degree of -1 as small as can be."""
    training, experimental = config.training, config.experimental
    shard = training.data_parallel_shard_degree
    if shard == -1:  # as few as the experts need to be spread over
        shard = -(-experimental.expert_parallel_degree // experimental.context_parallel_degree)
    inner = experimental.context_parallel_degree * training.tensor_parallel_degree
    return experimental.pipeline_parallel_degree * training.data_parallel_replicate_degree * shard * inner
