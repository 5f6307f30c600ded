"""Axes of the curves: the range that is shown, and the round numbers along it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from trainer.report.words import count

_FAR = 4.0  # a value so many times the range of nearly all others away from them is shown at the edge


@dataclass(frozen=True)
class Axis:
    """A range of values, `low` < `high`. Of `whole` numbers the ticks are whole as well."""

    low: float
    high: float
    whole: bool = False

    def place(self, value: float) -> float:
        """Where a value lies, from 0 at the low end to 1 at the high one; values outside are put to the edge."""
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))

    def ticks(self, most: int) -> list[float]:
        """Round numbers in the range."""
        raw = (self.high - self.low) / most
        power = 10.0 ** floor(log10(raw))
        step = next(f * power for f in (1, 2, 5, 10) if f * power >= raw * (1 - 1e-9))
        if self.whole:
            step = max(1.0, step)
        first, last = ceil(self.low / step - 1e-6), floor(self.high / step + 1e-6)
        return [step * index for index in range(first, last + 1)]


def step_axis(steps: Sequence[int]) -> Axis:
    """From the first step to the last."""
    low, high = min(steps, default=0), max(steps, default=1)
    return Axis(low, high, whole=True) if high > low else Axis(low - 1, low + 1, whole=True)


def value_axis(values: Sequence[float], *, from_zero: bool) -> Axis:
    """A range that holds the values, with some room; single ones that are very far away do not stretch it."""
    ordered = sorted(values) or [0.0, 1.0]
    low, high = _bulk(ordered)
    if from_zero and low >= 0:
        low = 0.0
    room = (high - low) * 0.06
    if room <= 1e-9 * max(abs(low), abs(high)):  # one value, or none that could be told apart
        room = abs(high) * 0.1 or 1.0
    return Axis(low if from_zero and low == 0 else low - room, high + room)


def _bulk(ordered: Sequence[float]) -> tuple[float, float]:
    """The lowest and the highest value, without the few that are very far from all others."""
    length = len(ordered)
    low, high = ordered[length // 50], ordered[length - 1 - length // 50]
    far = _FAR * max(high - low, 0.05 * abs(high))
    inside = [value for value in ordered if low - far <= value <= high + far]
    return inside[0], inside[-1]


def tick_texts(ticks: Sequence[float]) -> list[str]:
    """The ticks with as many decimals as their distance needs."""
    if len(ticks) < 2:
        return [count(each) if abs(each) >= 1 else f"{each:.3g}" for each in ticks]
    step, largest = ticks[1] - ticks[0], max(map(abs, ticks))
    if largest >= 1e4 and step >= 1e-3 * largest:
        return [_large(each, largest) for each in ticks]
    decimals = max(0, -floor(log10(step) + 1e-9))
    return [
        "0" if abs(each) < step / 2 else _scientific(each) if largest < 1e-3 else f"{each:,.{decimals}f}"
        for each in ticks
    ]


def _large(value: float, largest: float) -> str:
    for factor, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if largest >= factor * 10 or (largest >= factor and factor > 1e3):
            return "0" if value == 0 else f"{value / factor:.6g}{unit}" if largest < 1e15 else f"{value:.2g}"
    return f"{value:.6g}"


def _scientific(value: float) -> str:
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"
