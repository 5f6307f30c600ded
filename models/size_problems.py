"""Reasons why no model can have some sizes, which several families have in common."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, get_args

from models.decoder_sizes import NormType


def not_positive(sizes: Any, names: Iterable[str]) -> Iterator[str]:
    """A sentence for each of these sizes that is below 1."""
    for name in names:
        if getattr(sizes, name) < 1:
            yield f"{name} must be at least 1, got {getattr(sizes, name)}"


def not_above_zero(sizes: Any, names: Iterable[str]) -> Iterator[str]:
    """A sentence for each of these numbers that is not above 0."""
    for name in names:
        if not getattr(sizes, name) > 0:
            yield f"{name} must be above 0, got {getattr(sizes, name)}"


def norm_problems(norm_type: str) -> Iterator[str]:
    """A sentence if there is no such norm."""
    if norm_type not in get_args(NormType):
        yield f"norm_type must be one of {', '.join(get_args(NormType))}, got {norm_type!r}"
