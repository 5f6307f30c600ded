"""A field of the configuration in words: what it allows and what its default is. For help, docs and errors."""

import json
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import tomli
from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from trainer.config.schema import Config, Table
from trainer.config.tables.base import Allowed

_NAMES = {int: "integer", float: "number", bool: "true or false", str: "string"}
_BOUNDS = ((Ge, "ge", "≥"), (Gt, "gt", ">"), (Le, "le", "≤"), (Lt, "lt", "<"))


def tables() -> dict[str, type[Table]]:
    """The class of each table, by its name, in order."""
    kinds = ((name, field.annotation) for name, field in Config.model_fields.items())
    return {name: kind for name, kind in kinds if isinstance(kind, type) and issubclass(kind, Table)}


def fields() -> Iterator[tuple[str, FieldInfo]]:
    """Every key as "table.key", with its field, in order."""
    for table, kind in tables().items():
        for key, field in kind.model_fields.items():
            yield f"{table}.{key}", field


def find_field(key: str) -> FieldInfo | None:
    """The field of "table.key", or None if there is none."""
    table, _, name = key.partition(".")
    kind = tables().get(table)
    return None if kind is None else kind.model_fields.get(name)


def core_type(field: FieldInfo) -> Any:
    """The annotation of a field without None and metadata."""
    return _core(field.annotation)


def optional(field: FieldInfo) -> bool:
    """Whether the field can be unset."""
    return NoneType in get_args(field.annotation)


def choices(field: FieldInfo) -> tuple[str, ...]:
    """The values of a field that allows only some, else nothing."""
    core = core_type(field)
    return get_args(core) if get_origin(core) is Literal else ()


def allowed(field: FieldInfo) -> str:
    """What a field allows: "integer ≥ 1", "one of none, full, selective", ..."""
    metadata = tuple(_metadata(field))
    for item in metadata:
        if isinstance(item, Allowed):
            return item.text
    named = choices(field)
    if named:
        return f'"{named[0]}" only' if len(named) == 1 else f"one of {', '.join(named)}"
    bounds = [
        f"{sign} {_bound(getattr(item, attribute))}"
        for item in metadata
        for kind, attribute, sign in _BOUNDS
        if isinstance(item, kind)
    ]
    return f"{_NAMES[core_type(field)]} {' and '.join(bounds)}".strip()


def default(field: FieldInfo) -> str:
    """The default as it would stand in a file, or "unset"."""
    value = field.get_default(call_default_factory=True, validated_data={})
    return "unset" if value is None else literal(value)


def literal(value: object) -> str:
    """A value as it stands in a TOML file, on one line."""
    match value:
        case bool():
            return str(value).lower()
        case str():
            return json.dumps(value, ensure_ascii=False)
        case list() | tuple():
            return f"[{', '.join(map(literal, value))}]"
        case dict():
            return "{" + ", ".join(f"{key} = {literal(item)}" for key, item in value.items()) + "}"
    return str(value)


def read_literal(text: str) -> object:
    """A text as the value that a file would hold if it stood there, or the text itself if it could not."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return tomli.loads(f"value = {text}")["value"]
    except tomli.TOMLDecodeError:
        return text


def _bound(value: float) -> str:
    return "2⁶³" if value == 2**63 else f"{value:g}"


def _core(annotation: Any) -> Any:
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        return _core(next(part for part in get_args(annotation) if part is not NoneType))
    return _core(get_args(annotation)[0]) if origin is Annotated else annotation


def _metadata(field: FieldInfo) -> Iterator[Any]:
    """Of the field and, where it can be unset, of the type that it has otherwise."""
    yield from field.metadata
    for part in get_args(field.annotation):
        if get_origin(part) is Annotated:
            for item in get_args(part)[1:]:
                yield from item.metadata if isinstance(item, FieldInfo) else (item,)
