"""Data of which nothing is sure: every question to it has an answer, which may be None."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_LARGEST, _SMALLEST = 1e100, 1e-100  # beyond, ratios and differences of a few could not be told


@dataclass(frozen=True)
class Loose:
    """A value from a JSON or TOML file, or nothing (None)."""

    value: Any = None

    def __getitem__(self, key: str) -> Loose:
        """The member of that name, or nothing."""
        return Loose(self.value.get(key)) if isinstance(self.value, dict) else Loose()

    def items(self) -> list[Loose]:
        """The elements, if it is a list."""
        return [Loose(each) for each in self.value] if isinstance(self.value, list) else []

    def members(self) -> dict[str, Loose]:
        """The members by name, if it is an object."""
        return (
            {str(key): Loose(each) for key, each in self.value.items()}
            if isinstance(self.value, dict)
            else {}
        )

    def number(self) -> float | None:
        """A finite number; true and false are none."""
        if isinstance(self.value, bool) or not isinstance(self.value, int | float):
            return None
        if not abs(self.value) < _LARGEST:  # nor NaN
            return None
        return float(self.value) if abs(self.value) > _SMALLEST else 0.0

    def whole(self) -> int | None:
        """A number without a fraction."""
        number = self.number()
        return int(number) if number is not None and number == int(number) else None

    def string(self) -> str | None:
        """Text that is not empty."""
        return self.value if isinstance(self.value, str) and self.value else None
