"""The models that a configuration can name: families, their flavors, and how each is built. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from models.llama.sizes import LLAMA2, LLAMA3, LLAMA3_1, LLAMA3_2, LlamaSizes
from models.sizes import apply_overrides

if TYPE_CHECKING:
    from models.llama.model import Transformer


class UnknownModelError(ValueError):
    """No family, or no flavor of the family, of this name."""


@dataclass(frozen=True)
class Family:
    """Models of one architecture that differ in size: `sizes[flavor]`."""

    name: str
    sizes: Mapping[str, LlamaSizes]

    def build(self, sizes: LlamaSizes, modules: Sequence[str] | None = None) -> Transformer:
        """The model with the named modules only (None: all), on the current default device, not initialised.

        Use `torch.device("meta")` around the call for models that do not fit, then `to_empty` and
        `models.initialize.initialize_parameters`.
        """
        from models.llama.model import Transformer

        return Transformer(sizes, modules)


_FAMILIES = MappingProxyType(
    {
        name: Family(name, sizes)
        for name, sizes in (
            ("llama2", LLAMA2),
            ("llama3", LLAMA3),
            ("llama3.1", LLAMA3_1),
            ("llama3.2", LLAMA3_2),
        )
    }
)


def names() -> tuple[str, ...]:
    """The names of all families."""
    return tuple(_FAMILIES)


def family(name: str) -> Family:
    """The family of this name. Raises UnknownModelError, which lists the names there are."""
    if name not in _FAMILIES:
        raise UnknownModelError(f"there is no model {name!r}; the models are {', '.join(_FAMILIES)}")
    return _FAMILIES[name]


def configured_sizes(name: str, flavor: str, norm_type: str, override: Mapping[str, object]) -> LlamaSizes:
    """The sizes that a `[model]` table means: those of the flavor, with its norm and its overrides.

    Raises UnknownModelError, or SizesError for overrides that are impossible.
    """
    sizes = family(name).sizes
    if flavor not in sizes:
        raise UnknownModelError(f"{name} has no flavor {flavor!r}; its flavors are {', '.join(sizes)}")
    return apply_overrides(sizes[flavor], {"norm_type": norm_type, **override})
