"""Rules of expert parallelism: there are experts, and they can be spread evenly over ranks that there are."""

from __future__ import annotations

import math
from collections.abc import Iterator

from parallelisms.expert_plan import numbers_of_experts
from trainer.config.report import Problem, either, nearest_number
from trainer.config.rules.model import sizes_of
from trainer.config.rules.training import data_ranks
from trainer.config.schema import Config

_DEGREE = "experimental.expert_parallel_degree"
_SHARD = "training.data_parallel_shard_degree"
_CONTEXT = "experimental.context_parallel_degree"


def expert_parallelism_needs_experts(config: Config, _world_size: int | None) -> Iterator[Problem]:
    """A model without layers of experts has nothing to spread."""
    degree, sizes = config.experimental.expert_parallel_degree, sizes_of(config)
    if degree > 1 and sizes is not None and not numbers_of_experts(sizes):
        yield Problem(
            (_DEGREE, "model.name"), f"{config.model.name} has no experts", "1, or a model with experts", "1"
        )


def expert_parallel_degree_divides_the_experts(config: Config, _world_size: int | None) -> Iterator[Problem]:
    """Each rank of an expert group gets equally many of every layer's."""
    degree, sizes = config.experimental.expert_parallel_degree, sizes_of(config)
    experts = () if sizes is None else numbers_of_experts(sizes)
    common = math.gcd(*experts)
    if degree == 1 or not experts or common % degree == 0:
        return
    right = _divisors(common)
    keys = (_DEGREE, "model.override.n_experts", "model.flavor", "model.name")
    shown = " and ".join(map(str, experts))
    yield Problem(
        keys,
        f"does not divide the {shown} experts of a layer",
        either(right),
        str(nearest_number(degree, right)),
        degree,
    )


def expert_parallel_degree_divides_the_sharding_ranks(
    config: Config, world_size: int | None
) -> Iterator[Problem]:
    """Expert groups are ranks of the dimensions shard and context, so their size divides the product of the two.

    Silent where the product of all degrees is wrong.
    """
    degree, context = config.experimental.expert_parallel_degree, config.experimental.context_parallel_degree
    ranks = data_ranks(config, world_size)
    if degree == 1 or ranks is None:
        return
    shard = ranks // config.training.data_parallel_replicate_degree
    if shard * context % degree == 0:
        return
    right = _divisors(shard * context)
    of_context = f" × context_parallel_degree {context}" if context > 1 else ""
    yield Problem(
        (_DEGREE, _SHARD, _CONTEXT),
        f"does not divide data_parallel_shard_degree {shard}{of_context}, over whose ranks experts are spread",
        either(right),
        str(nearest_number(degree, right)),
        degree,
    )


def spread_experts_are_sharded_evenly(config: Config, world_size: int | None) -> Iterator[Problem]:
    """The ranks that hold the same experts share them: each gets as many, or an equal part of each.

    Silent where another rule already speaks.
    """
    degree, sizes, ranks = (
        config.experimental.expert_parallel_degree,
        sizes_of(config),
        data_ranks(config, world_size),
    )
    if degree == 1 or sizes is None or ranks is None:
        return
    spoken = (
        expert_parallelism_needs_experts,
        expert_parallel_degree_divides_the_experts,
        expert_parallel_degree_divides_the_sharding_ranks,
    )
    if any(problem for rule in spoken for problem in rule(config, world_size)):
        return
    shard = ranks // config.training.data_parallel_replicate_degree
    holders = shard * config.experimental.context_parallel_degree // degree
    each = [experts // degree for experts in numbers_of_experts(sizes)]
    if all(number % holders == 0 for number in each) or sizes.dim % holders == 0:
        return
    yield Problem(
        (_SHARD, _CONTEXT, _DEGREE, "model.override.dim"),
        f"{holders} ranks hold the same {each[0]} experts, and can divide neither these nor model.dim {sizes.dim}",
        f"a product with context_parallel_degree of {degree} × a divisor of {sizes.dim}",
        value=shard,
    )


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
