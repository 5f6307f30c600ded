"""Rules of [model]."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from types import NoneType
from typing import Any, get_args, get_type_hints

from models import registry
from models.external import is_place
from models.family import Family
from models.mixture import Balancing
from models.sizes import Sizes, SizesError
from trainer.config.report import Problem, nearest
from trainer.config.schema import Config

_NAMES = {int: "integer", float: "number", bool: "true or false", str: "string"}


def sizes_of(config: Config) -> Sizes | None:
    """The sizes that [model] means, or None if it means none (the rules here say why)."""
    model = config.model
    if any(overrides_are_sizes_of_the_family(config, None)):
        return None
    try:
        return registry.configured_sizes(model.name, model.flavor, model.norm_type, model.override)
    except (registry.UnknownModelError, SizesError):
        return None


def name_is_a_known_family(config: Config, _world_size: int | None) -> Iterator[Problem]:
    """[model] name is in the registry, or a place where there is a family."""
    name, names = config.model.name, registry.names()
    try:
        registry.family(name)
    except registry.UnknownModelError as error:
        if is_place(name):
            yield Problem(("model.name",), str(error))
            return
        allowed = f"one of {', '.join(names)}, or package.module:FAMILY or path/module.py:FAMILY"
        yield Problem(("model.name",), "there is no such model", allowed, nearest(name, names))


def flavor_is_one_of_the_family(config: Config, _world_size: int | None) -> Iterator[Problem]:
    """[model] flavor is a size of the family."""
    family = _family(config)
    if family is None:
        return
    flavor, flavors = config.model.flavor, family.sizes
    if flavor not in flavors:
        message = f"{config.model.name} has no such flavor"
        near = nearest(flavor, flavors, cutoff=0.4)
        yield Problem(("model.flavor", "model.name"), message, f"one of {', '.join(flavors)}", near, flavor)


def overrides_are_sizes_of_the_family(config: Config, _world_size: int | None) -> Iterator[Problem]:
    """Every key of [model.override] is a size of the family, with a value of its type."""
    example = _any_sizes(config)
    if example is None or not config.model.override:
        return
    types = get_type_hints(type(example))
    names = [field.name for field in fields(example) if field.name != "norm_type"]  # type: ignore[arg-type]
    for name, value in config.model.override.items():
        key = f"model.override.{name}"
        if name == "norm_type":
            yield Problem((key,), "is a key of [model] itself", suggestion="model.norm_type")
        elif name not in names:
            near = nearest(name, names)
            meant = near and f"model.override.{near}"
            yield Problem((key,), "unknown size", f"one of {', '.join(names)}", meant)
        else:
            wanted = _wanted(types[name], value)
            if wanted is not None:
                yield Problem((key,), f"is of the wrong type for {name}", wanted)


def sizes_fit_together(config: Config, _world_size: int | None) -> Iterator[Problem]:
    """Heads divide the hidden size, key-value heads divide heads, nothing is zero: what the family itself asks."""
    model = config.model
    if _any_sizes(config) is None or any(overrides_are_sizes_of_the_family(config, None)):
        return
    try:
        registry.configured_sizes(model.name, model.flavor, model.norm_type, model.override)
    except SizesError as error:
        for reason in error.problems:
            named = sorted((name for name in model.override if name in reason), key=reason.index)
            yield Problem((*(f"model.override.{name}" for name in named), "model.flavor"), reason)


def balanced_models_have_experts(config: Config, _world_size: int | None) -> Iterator[Problem]:
    """The strengths of balancing are for models with experts, and the rate for those whose choice has a bias."""
    sizes = sizes_of(config)
    if sizes is None:
        return
    published = getattr(sizes, "balancing", Balancing())
    training, model = config.training, f"{config.model.name} {config.model.flavor}"
    if training.load_balance_loss and not published.loss:
        yield Problem(
            ("training.load_balance_loss", "model.name"), f"{model} has no experts to balance", "0, or unset"
        )
    if training.debug_moe_force_load_balance and published == Balancing():
        reason = f"{model} has no experts"
        yield Problem(("training.debug_moe_force_load_balance", "model.name"), reason, "false")
    if training.load_balance_rate and not published.rate:
        reason = "balances its experts by the loss alone" if published.loss else "has no experts to balance"
        yield Problem(("training.load_balance_rate", "model.name"), f"{model} {reason}", "0, or unset")


def sequences_longer_than_the_model_was_made_for(config: Config) -> Iterator[str]:
    """A notice: rotary positions reach further than the family's longest sequence, but were not made for it."""
    sizes = sizes_of(config)
    if sizes is not None and config.training.seq_len > sizes.max_seq_len:
        yield (
            f"training.seq_len = {config.training.seq_len} is beyond the {sizes.max_seq_len} positions of "
            f"{config.model.name} {config.model.flavor}"
        )


def _any_sizes(config: Config) -> Sizes | None:
    family = _family(config)
    return None if family is None else family.sizes.get(config.model.flavor)


def _family(config: Config) -> Family | None:
    try:
        return registry.family(config.model.name)
    except registry.UnknownModelError:
        return None


def _wanted(annotation: Any, value: object) -> str | None:
    """What a field wants instead of the value, or None if the value is of its type."""
    parts = [part for part in get_args(annotation) or (annotation,) if part is not NoneType]
    if parts[0] in _NAMES:
        kind = parts[0]
        fits = type(value) is kind or (kind is float and type(value) is int)
        return None if fits else _NAMES[kind]
    # A part with fields of its own, such as the rotary scaling: a table of them, or false for none.
    if value is False:
        return None
    types = get_type_hints(parts[0])
    if not isinstance(value, Mapping) or not set(value) <= set(types):
        return f"false, or a table of {', '.join(types)}"
    wrong = [name for name, each in value.items() if _wanted(types[name], each)]
    return f"{wrong[0]}: {_wanted(types[wrong[0]], value[wrong[0]])}" if wrong else None
