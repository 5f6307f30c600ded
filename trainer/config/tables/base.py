"""What every table of the configuration has in common, and the types that several of them use."""

import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError


class Table(BaseModel):
    """A table of the configuration file: frozen, strict, and without unknown keys.

    Strict means that a value has the type that the field names: no string is read as a number, and neither a
    boolean nor a float is taken for an integer. Integers are accepted for floats. NaN and infinity are not.
    """

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


@dataclass(frozen=True)
class Allowed:
    """Says in words what a field's type allows, where its annotation alone does not tell."""

    text: str


def as_tuple(value: object) -> object:
    # TOML has arrays only; a frozen class holds a tuple.
    return tuple(value) if isinstance(value, list) else value


def _split(value: object) -> object:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return as_tuple(value)


def _rest_or_positive(value: int) -> int:
    if value < 1 and value != -1:
        raise PydanticCustomError("neither_degree_nor_rest", "is neither a number of ranks nor -1")
    return value


def _all_or_positive(value: int) -> int:
    if value < 1 and value != -1:
        raise PydanticCustomError("neither_batches_nor_all", "is neither a number of batches nor -1")
    return value


def _seconds(value: object) -> object:
    """Hours, minutes and seconds, maybe with days, as seconds: "2:00:00", "1-12:00:00"."""
    matched = re.fullmatch(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)", value) if isinstance(value, str) else None
    if matched is None:
        return value
    days, hours, minutes, seconds = (int(part or 0) for part in matched.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _every_nth_or_operations(value: str) -> str:
    if value != "op" and not (value.isascii() and value.isdecimal() and int(value) >= 1):
        raise PydanticCustomError("not_every_nth", "does not say every how many layers")
    return value


Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]

DegreeOrRest = Annotated[
    int, AfterValidator(_rest_or_positive), Allowed("integer ≥ 1, or -1: all that remain")
]
BatchesOrAll = Annotated[int, AfterValidator(_all_or_positive), Allowed("integer ≥ 1, or -1: the whole set")]
EveryNthOrOperations = Annotated[
    str,
    AfterValidator(_every_nth_or_operations),
    Allowed('a number ≥ 1 as a string, such as "2", or "op"'),
]
Names = Annotated[
    tuple[str, ...], BeforeValidator(_split), Allowed("list of strings, or one string with commas")
]
Steps = Annotated[
    tuple[Positive, ...], BeforeValidator(as_tuple), Allowed("list of step numbers, each an integer ≥ 1")
]
Duration = Annotated[
    Positive,
    BeforeValidator(_seconds),
    Allowed('time such as "2:00:00" or "1-12:00:00", or a number of seconds ≥ 1'),
]
Betas = Annotated[
    tuple[BelowOne, BelowOne], BeforeValidator(as_tuple), Allowed("list of two numbers ≥ 0 and < 1")
]
