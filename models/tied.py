"""Which parts of a model hold the embedding's matrix where the output is tied to it. No torch here.

A part whose output is tied to an embedding that it does not have holds a copy of the matrix, under the embedding's
name. Where embedding and output can be tied, they are the modules "tok_embeddings", whose only parameter is
"tok_embeddings.weight", and "output", which has none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from models.sizes import Sizes

EMBEDDING = "tok_embeddings"
MATRIX = "tok_embeddings.weight"


def copies_embedding(sizes: Sizes, modules: Sequence[str]) -> bool:
    """Whether a part of these modules holds a copy of the embedding."""
    return sizes.tie_embeddings and "output" in modules and EMBEDDING not in modules


def copied_names(sizes: Sizes, modules: Sequence[str]) -> frozenset[str]:
    """Full names of the parameters that a part of these modules holds a copy of."""
    return frozenset((MATRIX,)) if copies_embedding(sizes, modules) else frozenset()


def held_shapes(sizes: Sizes, modules: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter that a part of these modules holds, by its full name, the copy included."""
    copied = (EMBEDDING,) if copies_embedding(sizes, modules) else ()
    return {n: s for module in (*modules, *copied) for n, s in sizes.parameter_shapes(module).items()}


def held_count(sizes: Sizes, modules: Sequence[str]) -> int:
    """How many parameters a part of these modules holds, the copy included."""
    return sum(math.prod(shape) for shape in held_shapes(sizes, modules).values())
