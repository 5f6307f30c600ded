"""Numbers of a report as words; what is not known is a dash."""

from __future__ import annotations

import json
from typing import Any

from trainer.plan.tables import seconds, size

UNKNOWN = "–"


def count(value: float | None) -> str:
    """A count: in full up to six digits, then with the unit that leaves few."""
    if value is None:
        return UNKNOWN
    for factor, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if abs(value) >= factor:
            return f"{value / factor:,.3g} {unit}" if abs(value) < 1e15 else f"{value:.3g}"
    return f"{value:,.0f}"


def figure(value: float | None) -> str:
    """A number of any size with four significant digits."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def share(value: float | None) -> str:
    """A share of 1 in per cent."""
    return UNKNOWN if value is None else f"{value:.1%}"


def time(value: float | None) -> str:
    """Seconds."""
    return UNKNOWN if value is None else seconds(value)


def memory(value: float | None) -> str:
    """Bytes."""
    return UNKNOWN if value is None else size(int(value))


def literal(value: Any) -> str:
    """A value of a configuration, as it is written."""
    return json.dumps(value, ensure_ascii=False, default=str)


def counted(number: float, one: str, many: str) -> str:
    """A count and what is counted."""
    return f"{count(number)} {one if number == 1 else many}"
