"""A family: models of one architecture that differ in size, as data. No torch here; the model is imported when built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from models.layers.decoder import Decoder


@dataclass(frozen=True)
class Family:
    """Models of one architecture: `sizes[flavor]`.

    Attributes:
        name: what a configuration calls it.
        sizes: of each flavor, see `models.sizes.Sizes`; all of the same class.
        package: the full name of the package whose module `model` has the class `Transformer`, and whose module
            `hf`, if there is one, knows Hugging Face's names for the weights.
    """

    name: str
    sizes: Mapping[str, Any]
    package: str

    def build(self, sizes: Any, modules: Sequence[str] | None = None) -> Decoder:
        """The model with the named modules only (None: all), on the current default device, not initialised.

        Use `torch.device("meta")` around the call for models that do not fit, then `to_empty` and
        `models.initialize.initialize_parameters`.
        """
        model: Decoder = import_module(f"{self.package}.model").Transformer(sizes, modules)
        return model

    def hf(self) -> ModuleType:
        """The module that maps names and sizes to those of Hugging Face.

        Raises ModuleNotFoundError if the family has none.
        """
        return import_module(f"{self.package}.hf")
