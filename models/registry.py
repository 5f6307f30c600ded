"""The models that a configuration can name: a line for each family, which lives in a folder of its own. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from models.external import FamilyNotFound, family_at, is_place
from models.family import Family
from models.sizes import apply_overrides

_FAMILIES = MappingProxyType(
    {
        "llama2": "models.llama:LLAMA2",
        "llama3": "models.llama:LLAMA3",
        "llama3.1": "models.llama:LLAMA3_1",
        "llama3.2": "models.llama:LLAMA3_2",
        "llama3.3": "models.llama:LLAMA3_3",
        "qwen3": "models.qwen3:QWEN3",
        "qwen3_moe": "models.qwen3_moe:QWEN3_MOE",
        "deepseek_v3": "models.deepseek_v3:DEEPSEEK_V3",
    }
)


class UnknownModelError(ValueError):
    """No family, or no flavor of the family, of this name; the reason in one line."""


def names() -> tuple[str, ...]:
    """The names of all families."""
    return tuple(_FAMILIES)


def family(name: str) -> Family:
    """The family of this name, one of `names()` or a place, see `models.external`.

    Raises UnknownModelError, which lists the names there are, or says why there is nothing at the place.
    """
    if name not in _FAMILIES and not is_place(name):
        raise UnknownModelError(f"there is no model {name!r}; the models are {', '.join(_FAMILIES)}")
    try:
        return family_at(_FAMILIES.get(name, name))
    except FamilyNotFound as error:
        raise UnknownModelError(str(error)) from error


def configured_sizes(name: str, flavor: str, norm_type: str, override: Mapping[str, object]) -> Any:
    """The sizes that a `[model]` table means: those of the flavor, with its norm and its overrides.

    Raises UnknownModelError, or SizesError for overrides that are impossible.
    """
    sizes = family(name).sizes
    if flavor not in sizes:
        raise UnknownModelError(f"{name} has no flavor {flavor!r}; its flavors are {', '.join(sizes)}")
    return apply_overrides(sizes[flavor], {"norm_type": norm_type, **override})
