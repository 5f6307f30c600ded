"""What every family's sizes can answer, as plain arithmetic: no torch, so that a laptop plans any model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, TypeVar

from models.activations import Kernels, Saved


class SizesError(ValueError):
    """Sizes that no model can have. `problems` holds one sentence for each."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


@dataclass(frozen=True)
class RopeScaling:
    """Stretching of the rotary wavelengths that takes Llama 3.1 from 8,192 positions to 131,072.

    Wavelengths longer than `original_max_seq_len / low_freq_factor` are stretched by `factor`, those shorter
    than `original_max_seq_len / high_freq_factor` are kept, and those between are blended.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192


class Sizes(Protocol):
    """The sizes of one model. A module is a unit of pipeline splitting, named as in the built model."""

    @property
    def dim(self) -> int:
        """Width of the hidden state that travels between stages."""
        ...

    @property
    def n_layers(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_seq_len(self) -> int: ...

    @property
    def tie_embeddings(self) -> bool: ...

    def modules(self) -> tuple[str, ...]:
        """All modules in the order in which the forward pass meets them."""
        ...

    def parameter_shapes(self, module: str) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter of a module, by its full name."""
        ...

    def parameter_count(self, module: str | None = None) -> int:
        """Parameters of one module, or of the whole model."""
        ...

    def flops_per_token(self, seq_len: int, module: str | None = None) -> int:
        """Floating-point operations of forward and backward for one token of a sequence of `seq_len`."""
        ...

    def saved(self, module: str, element: int, kernels: Kernels) -> Saved:
        """What a module keeps for its backward; `element` is the bytes of a number in the compute format."""
        ...


AnySizes = TypeVar("AnySizes", bound=Sizes)


def apply_overrides(sizes: AnySizes, override: Mapping[str, object]) -> AnySizes:
    """`sizes` with some fields changed, as `[model.override]` gives them; None leaves a field as it is.

    `rope_scaling` may be a table of its fields, or false for none. Raises SizesError for a field that does not
    exist and for sizes that are impossible together.
    """
    changes: dict[str, Any] = {name: value for name, value in override.items() if value is not None}
    known = {field.name for field in fields(sizes)}  # type: ignore[arg-type]
    unknown = [f"{name} is not among {', '.join(sorted(known))}" for name in changes if name not in known]
    if unknown:
        raise SizesError(tuple(unknown))
    scaling = changes.get("rope_scaling")
    if scaling is False:
        changes["rope_scaling"] = None
    elif isinstance(scaling, Mapping):
        changes["rope_scaling"] = _scaling(scaling)
    return replace(sizes, **changes)  # type: ignore[type-var]


def _scaling(table: Mapping[str, Any]) -> RopeScaling:
    """The scaling that a table describes, its defaults those of Llama 3.1. Raises SizesError for other keys."""
    known = {field.name for field in fields(RopeScaling)}
    if unknown := sorted(set(table) - known):
        raise SizesError(
            tuple(f"rope_scaling.{name} is not among {', '.join(sorted(known))}" for name in unknown)
        )
    return RopeScaling(**table)
