"""How expert parallelism cuts parameters, as plain data: what is applied and what the plan counts. No torch here.

Experts are stacked, as layers.N.moe.experts.{w1, w2, w3} (E, ...). Each rank of an expert group has E / n of them that
follow one another. All other parameters are as without expert parallelism.
"""

from __future__ import annotations

from models.sizes import Sizes


def is_of_experts(name: str) -> bool:
    """Whether the parameter of this full name is a stack of experts."""
    return name.split(".")[-2:-1] == ["experts"]


def numbers_of_experts(sizes: Sizes) -> tuple[int, ...]:
    """How many experts the layers of a model have, each number once; none: it has no layer of experts."""
    return tuple(
        dict.fromkeys(
            shape[0]
            for module in sizes.modules()
            for name, shape in sizes.parameter_shapes(module).items()
            if is_of_experts(name)
        )
    )
