"""Rules of context parallelism: sequences, and for one method heads, must be divisible over its ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator

from parallelisms.context.split import SequenceSplit
from trainer.config.report import Problem, nearest_number
from trainer.config.rules.model import sizes_of
from trainer.config.schema import Config

_DEGREE = "experimental.context_parallel_degree"
_BALANCER = "experimental.context_parallel_load_balancer"
_METHOD = "experimental.context_parallel_rotate_method"
_TENSOR = "training.tensor_parallel_degree"


def context_parallel_degree_divides_the_sequence(
    config: Config, _world_size: int | None
) -> Iterator[Problem]:
    """Every sequence is cut into equal chunks, of training and of validation; headtail gives a rank two of them.

    Silent where the rule of tensor parallelism, which cuts each rank's part again, speaks already.
    """
    experimental, tensor = config.experimental, config.training.tensor_parallel_degree
    degree, balancer = experimental.context_parallel_degree, experimental.context_parallel_load_balancer
    chunks = SequenceSplit(degree, balancer == "headtail").divisor
    lengths = {"training.seq_len": config.training.seq_len}
    if config.validation.enable and config.validation.seq_len is not None:
        lengths["validation.seq_len"] = config.validation.seq_len
    for key, length in lengths.items():
        spoken = tensor > 1 and length % (tensor * degree)
        if degree == 1 or spoken or length % chunks == 0:
            continue
        unit = math.lcm(chunks, tensor * degree)
        below, above = length // unit * unit, -(-length // unit) * unit
        per_rank = chunks // degree
        yield Problem(
            (key, _DEGREE, _BALANCER),
            f"is not divisible into {chunks} chunks ({per_rank} for each of {degree} context ranks)",
            f"multiples of {unit}",
            " or ".join(str(each) for each in (below, above) if each > 0),
            length,
        )


def ulysses_divides_the_heads(config: Config, _world_size: int | None) -> Iterator[Problem]:
    """Each context rank gets whole heads: those of a tensor rank are divided again."""
    experimental, sizes = config.experimental, sizes_of(config)
    degree, tensor = experimental.context_parallel_degree, config.training.tensor_parallel_degree
    if experimental.context_parallel_rotate_method != "ulysses" or degree == 1 or sizes is None:
        return
    heads, kv_heads = getattr(sizes, "n_heads", None), getattr(sizes, "n_kv_heads", None)
    if heads is None or kv_heads is None or heads % tensor or kv_heads % tensor:
        return
    heads, kv_heads = heads // tensor, kv_heads // tensor
    right = [each for each in range(1, heads + 1) if _divides(each, heads, kv_heads)]
    if degree in right:
        return
    whose = f" of a tensor rank (of {tensor})" if tensor > 1 else ""
    yield Problem(
        (_METHOD, _DEGREE, _TENSOR),
        f"cannot divide {heads} heads of queries and {kv_heads} of keys{whose} over {degree} context ranks",
        f"allgather, alltoall, or {_DEGREE} {' or '.join(map(str, right))}",
        f"{_DEGREE} = {nearest_number(degree, right)}",
    )


def _divides(degree: int, heads: int, kv_heads: int) -> bool:
    """Whether ranks get equally many heads, and each of keys and values goes to a whole number of ranks."""
    return heads % degree == 0 and (kv_heads % degree == 0 or degree % kv_heads == 0)
