"""Which of our families a model is of, and what a configuration calls it. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, cast

from models import registry
from models.family import Family
from models.hf import Config, HuggingFaceFormat, UnsupportedConfig
from models.sizes import SizesError
from trainer.errors import ConfigurationError


@dataclass(frozen=True)
class Named:
    """A model in the words of the table [model]."""

    name: str
    flavor: str
    norm_type: str
    override: Mapping[str, Any]
    sizes: Any


def hugging_face_format(family: Family) -> HuggingFaceFormat | None:
    """The family's module `hf`, if it has one."""
    try:
        return cast(HuggingFaceFormat, family.hf())
    except ModuleNotFoundError as error:
        if error.name != f"{family.package}.hf":
            raise
        return None


def format_of(config: Config, path: Path, among: Iterable[Family] | None = None) -> HuggingFaceFormat:
    """The module of a family, by default of any in the registry, that knows the `model_type` of a `config.json`.

    Raises ConfigurationError, with the folder's path, if there is none.
    """
    kind = config.get("model_type")
    families = _families() if among is None else among
    formats = [found for family in families if (found := hugging_face_format(family)) is not None]
    for found in formats:
        if kind in found.MODEL_TYPES:
            return found
    known = sorted({name for found in formats for name in found.MODEL_TYPES})
    raise ConfigurationError(
        f"{path}/config.json: model_type = {kind!r}; expected {', '.join(known) or 'a family with a module hf'}"
    )


def sizes_of(config: Config, path: Path, among: Iterable[Family] | None = None) -> Any:
    """The sizes that the `config.json` of a folder says. Raises ConfigurationError with what is not supported."""
    try:
        return format_of(config, path, among).sizes_of(config)
    except (UnsupportedConfig, SizesError, TypeError) as error:
        raise ConfigurationError(f"{path}/config.json: {error}") from error


def name_of(sizes: Any) -> Named:
    """A name, flavor and overrides that mean exactly these sizes, with as few overrides as there can be.

    Raises ConfigurationError if no configuration can say them.
    """
    candidates = [
        Named(family.name, flavor, sizes.norm_type, _differences(known, sizes), sizes)
        for family in _families()
        for flavor, known in family.sizes.items()
        if type(known) is type(sizes)
    ]
    if not candidates:
        raise ConfigurationError(f"no family has sizes of the kind {type(sizes).__name__}")
    named = min(candidates, key=lambda candidate: len(candidate.override))
    if registry.configured_sizes(named.name, named.flavor, named.norm_type, named.override) != sizes:
        raise ConfigurationError(f"{named.name} cannot be configured to be {sizes}")
    return named


def differences(there: Any, here: Any) -> str:
    """In which sizes two models differ, in words."""
    if type(there) is not type(here):
        return f"{type(there).__name__} there, {type(here).__name__} here"
    names = [field.name for field in fields(there) if getattr(there, field.name) != getattr(here, field.name)]
    return "; ".join(f"{name} = {getattr(there, name)} there, {getattr(here, name)} here" for name in names)


def _families() -> Iterator[Family]:
    return (registry.family(name) for name in registry.names())


def _differences(known: Any, sizes: Any) -> dict[str, Any]:
    """What [model.override] must say to come from one flavor's sizes to these."""
    names = [field.name for field in fields(sizes) if field.name != "norm_type"]
    return {
        name: _as_toml(getattr(sizes, name)) for name in names if getattr(sizes, name) != getattr(known, name)
    }


def _as_toml(value: Any) -> Any:
    if value is None:
        return False
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return list(value) if isinstance(value, tuple) else value
