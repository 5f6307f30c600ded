"""Given values in today's keys: applies the tables of `trainer.config.legacy`, with a notice for each old spelling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from trainer import __version__
from trainer.config.describe import literal
from trainer.config.layers import FORMER_ENTRIES
from trainer.config.legacy import (
    CONVERTED,
    FLAVORS,
    GOVERNED,
    RENAMED,
    TABLES,
    UNAVAILABLE,
    UNAVAILABLE_VALUES,
    UNSET_BY,
    VALUES,
)
from trainer.config.report import Given, Problem

_MICROBATCH_SIZE = "experimental.pipeline_parallel_microbatch_size"
_MICROBATCHES = "experimental.pipeline_parallel_microbatches"
_BATCH_SIZE = "training.batch_size"
_USUAL_BATCH_SIZE = 8
_BETAS = {"optimizer.beta1": 0.9, "optimizer.beta2": 0.95}


@dataclass
class Translated:
    """Values by today's keys; a value's source keeps the old spelling. Problems are about keys in `given`."""

    values: dict[str, Given] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    refused: dict[str, Given] = field(default_factory=dict)

    @property
    def given(self) -> Mapping[str, Given]:
        """All values that problems speak of, also those that were refused."""
        return {**self.values, **self.refused}


def translate(*layers: Mapping[str, Given]) -> Translated:
    """All sources in today's keys; later ones go before earlier ones, whatever the spelling in either."""
    result = Translated()
    later = [_meanings(layer) for layer in layers]
    for index, layer in enumerate(layers):
        names: dict[str, str] = {}
        replaced = set().union(*later[index + 1 :])
        for key in layer:
            today, _ = _renamed(key, None)
            if today in names:
                result.problems.append(Problem((today,), f"is given twice, as {names[today]} and as {key}"))
            names[today] = key
            if today not in replaced or _goes_on(layer[key].value, layers[index + 1 :], today):
                _translate(key, layer[key], result, layer)
    _join_betas(result)
    _count_microbatches(result)
    _name_the_flavor(result)
    return result


def _meanings(layer: Mapping[str, Given]) -> set[str]:
    """Today's keys of a source, and those that say the same in other words."""
    keys = {_renamed(key, None)[0] for key in layer}
    if "optimizer.betas" in keys:
        keys |= _BETAS.keys()
    if keys & {_MICROBATCHES, _MICROBATCH_SIZE}:
        keys |= {_MICROBATCHES, _MICROBATCH_SIZE}
    return keys


def _goes_on(value: object, later: Sequence[Mapping[str, Given]], today: str) -> bool:
    """Whether a list is not replaced by a later one but continued."""
    following = [layer[key].value for layer in later for key in layer if _renamed(key, None)[0] == today]
    return isinstance(value, list) and all(_has_former(each) for each in following)


def _has_former(value: object) -> bool:
    return isinstance(value, list) and FORMER_ENTRIES in value


def _with_former(value: object, former: Given | None) -> object:
    """A list with the entries of the former one in place of "..."."""
    if not (isinstance(value, list) and _has_former(value)):
        return value
    entries = former.value if former is not None and isinstance(former.value, list) else []
    return [each for entry in value for each in (entries if entry == FORMER_ENTRIES else [entry])]


def _translate(key: str, given: Given, result: Translated, source: Mapping[str, Given]) -> None:
    if key in TABLES and given.value == {}:
        return
    today, value = _renamed(key, given.value)
    if today in UNSET_BY and value == UNSET_BY[today] and not isinstance(value, bool):
        value = None
    elif isinstance(value, str) and value in VALUES.get(today, {}):
        value = VALUES[today][value]
        if today.endswith(".dataset") and value == "python_docs" and f"{today}_path" in source:
            value = "jsonl"  # what torchtitan keeps at that path
    value = _with_former(value, result.values.get(today))
    if today in GOVERNED:
        return
    if today in UNAVAILABLE:
        _refuse_unless_neutral(today, given, value, result)
        return
    if value in UNAVAILABLE_VALUES.get(today, ()) and not isinstance(value, bool):
        _refuse(today, given, f"{literal(value)} is known from torchtitan, not available", None, result)
        return
    joined_later = today in _BETAS or today == _MICROBATCH_SIZE
    other_words = today != key or (value != given.value and not _has_former(given.value))
    if other_words and value is not None and not joined_later:
        result.notices.append(
            f"{given.source.place}: {_old(given)} is spelled {today} = {literal(value)} today"
        )
    result.values[today] = replace(given, value=value)


def _renamed(key: str, value: object) -> tuple[str, object]:
    today = RENAMED.get(key, key)
    if today in CONVERTED:
        conversion = CONVERTED[today]
        return conversion.key, conversion.convert(value)
    return today, value


def _old(given: Given) -> str:
    typed = literal(given.value) if given.source.text is None else given.source.text
    return f"{given.source.spelling}{' ' if given.source.on_command_line else ' = '}{typed}"


def _refuse_unless_neutral(today: str, given: Given, value: object, result: Translated) -> None:
    neutral = UNAVAILABLE[today]
    plain = tuple(value) if isinstance(value, list) else value
    if value is None or any(plain == each and type(plain) is type(each) for each in neutral):
        return
    allowed = " or ".join(literal(each) for each in neutral) if neutral else "leaving it out"
    _refuse(today, given, "known from torchtitan, not available", allowed, result)


def _refuse(today: str, given: Given, reason: str, allowed: str | None, result: Translated) -> None:
    result.refused[today] = given
    result.problems.append(Problem((today,), f"{reason} in Stageline {__version__}", allowed))


def _join_betas(result: Translated) -> None:
    """beta1 and beta2 into betas; one that is not given has torchtitan's default, which is ours."""
    given = {key: result.values.pop(key) for key in _BETAS if key in result.values}
    if not given:
        return
    betas = [given[key].value if key in given else usual for key, usual in _BETAS.items()]
    first = next(iter(given.values()))
    old = " and ".join(each.source.spelling for each in given.values())
    result.notices.append(f"{first.source.place}: {old}: spelled optimizer.betas = {literal(betas)} today")
    result.values["optimizer.betas"] = replace(first, value=betas)


def _count_microbatches(result: Translated) -> None:
    """torchtitan 0.1 and later give the size of a microbatch, we their number."""
    given = result.values.pop(_MICROBATCH_SIZE, None)
    if given is None:
        return
    batch = result.values.get(_BATCH_SIZE)
    batch_size = _USUAL_BATCH_SIZE if batch is None else batch.value
    if not (_is_count(given.value) and _is_count(batch_size)):
        if not _is_count(given.value):
            result.refused[_MICROBATCHES] = given
            result.problems.append(Problem((_MICROBATCHES,), "is no size of a microbatch", "integer ≥ 1"))
        return
    assert isinstance(given.value, int)
    assert isinstance(batch_size, int)
    microbatches = -(-batch_size // given.value)
    result.notices.append(
        f"{given.source.place}: {_old(given)} is spelled {_MICROBATCHES} = {microbatches} today: "
        f"the number of microbatches, here of {_BATCH_SIZE} = {batch_size}"
    )
    result.values.setdefault(_MICROBATCHES, replace(given, value=microbatches))


def _name_the_flavor(result: Translated) -> None:
    """A model of torchtitan by its name and sizes here; sizes that are given stay."""
    given = result.values.get("model.flavor")
    if given is None or not isinstance(given.value, str):
        return
    name = result.values["model.name"].value if "model.name" in result.values else "llama3"
    today = FLAVORS.get((str(name), given.value))
    if today is None:
        return
    said = ", ".join(f"{key} = {literal(value)}" for key, value in today.items() if value != name)
    result.notices.append(f"{given.source.place}: {_old(given)} is spelled {said} today")
    for key, value in today.items():
        if key in ("model.name", "model.flavor"):
            result.values[key] = replace(given, value=value)
        elif "model.override" not in result.values:
            result.values.setdefault(key, replace(given, value=value))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
