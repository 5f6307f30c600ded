"""What every family's sizes can answer, as plain arithmetic: no torch, so that a laptop plans any model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, TypeVar, get_args, get_type_hints

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


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv 2309.00071): stretching of the rotary wavelengths, as DeepSeek-V3 and Qwen3 use it.

    Pairs that turn less than `beta_slow` times over the original context are slowed by `factor`, those that turn
    more than `beta_fast` times are kept, and those between are blended. Attention is sharpened to make up for the
    larger context (section 3.4), where `mscale` says how much: DeepSeek multiplies the products of queries and keys
    by the square of `sharpening(mscale_all_dim)`, and what is turned by the quotient of `sharpening(mscale)` and
    that. Where `mscale_all_dim` is 0, as in the paper, only what is turned is multiplied, by `sharpening(1)`.
    """

    factor: float = 4.0
    original_max_seq_len: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    @property
    def amplitude(self) -> float:
        """By which queries and keys are multiplied where they are turned."""
        if not (self.mscale and self.mscale_all_dim):
            return self._sharpening(1.0)
        return self._sharpening(self.mscale) / self._sharpening(self.mscale_all_dim)

    @property
    def product_scale(self) -> float:
        """By which the products of queries and keys are multiplied beside that."""
        return self._sharpening(self.mscale_all_dim) ** 2

    def _sharpening(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


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

    def kind(self, module: str) -> str:
        """Modules of the same kind are alike in everything but their name."""
        ...

    def parameter_shapes(self, module: str) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter of a module, by its full name."""
        ...

    def parameter_count(self, module: str | None = None) -> int:
        """Parameters of one module, or of the whole model."""
        ...

    def active_parameter_count(self, module: str | None = None) -> int:
        """Those that one token goes through: not the experts that it is not sent to."""
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
        changes["rope_scaling"] = _scaling(_scaling_type(type(sizes)), scaling)
    return replace(sizes, **changes)  # type: ignore[type-var]


def _scaling_type(sizes: type) -> type:
    """Which kind of scaling the family has: what its field `rope_scaling` can be beside None."""
    annotation = get_type_hints(sizes)["rope_scaling"]
    found: type = next(kind for kind in get_args(annotation) if kind is not type(None))
    return found


def _scaling(kind: type, table: Mapping[str, Any]) -> Any:
    """The scaling that a table describes; what it does not say is the kind's default. Raises SizesError."""
    known = {field.name for field in fields(kind)}
    if unknown := sorted(set(table) - known):
        raise SizesError(
            tuple(f"rope_scaling.{name} is not among {', '.join(sorted(known))}" for name in unknown)
        )
    return kind(**table)
