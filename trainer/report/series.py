"""Values over steps, from the rows of metrics.jsonl, and how they are made fit to be drawn."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from trainer.report.loose import Loose

_LAST_STEP = 2**53  # beyond, JavaScript would show another one


@dataclass(frozen=True)
class Series:
    """Values over steps, which rise; a value that was not finite when it was logged is None."""

    steps: tuple[int, ...] = ()
    values: tuple[float | None, ...] = ()

    @property
    def known(self) -> list[tuple[int, float]]:
        """The steps that have a value, with it."""
        return [
            (step, value) for step, value in zip(self.steps, self.values, strict=True) if value is not None
        ]

    @property
    def last(self) -> tuple[int, float] | None:
        """The last step that has a value, with it."""
        known = self.known
        return known[-1] if known else None

    @property
    def lowest(self) -> tuple[int, float] | None:
        """The first step that has the lowest value, with it."""
        return min(self.known, key=lambda point: point[1], default=None)

    def median(self) -> float | None:
        """Of all values but the first, whose step warms everything up, unless there is no other."""
        values = [value for _, value in self.known]
        return median(values[1:] or values) if values else None


def series(rows: Sequence[Loose], key: str) -> Series:
    """The values under a key, in the order of the steps; of a step that is there twice the last."""
    found: dict[int, float | None] = {}
    for row in rows:
        step = row["step"].whole()
        if step is not None and abs(step) < _LAST_STEP and key in row.members():
            found[step] = row[key].number()
    steps = sorted(found)
    return Series(tuple(steps), tuple(found[step] for step in steps))


def thinned(data: Series, most: int) -> Series:
    """About `most` points at most: of each stretch of steps the lowest and the highest, so that no spike is lost.

    Gaps in the values remain where a stretch has no value.
    """
    length = len(data.steps)
    if length <= most:
        return data
    buckets = max(1, most // 2)
    kept: set[int] = {0, length - 1}
    for bucket in range(buckets):
        indices = range(bucket * length // buckets, (bucket + 1) * length // buckets)
        valued = [(value, index) for index in indices if (value := data.values[index]) is not None]
        kept |= {min(valued)[1], max(valued)[1]} if valued else {indices[0]}
    chosen = sorted(kept)
    return Series(tuple(data.steps[i] for i in chosen), tuple(data.values[i] for i in chosen))


def smoothed(data: Series, width: int) -> Series:
    """At each step the median of the `width` values around it, fewer at both ends. `width` is odd.

    As many values on the left as on the right: a window that leans to one side would bend the ends.
    """
    half, length = width // 2, len(data.values)
    window: list[float] = []  # sorted
    first = end = 0
    medians = []
    for index, value in enumerate(data.values):
        reach = min(half, index, length - 1 - index)
        for entering in data.values[end : index + reach + 1]:
            if entering is not None:
                insort(window, entering)
        for leaving in data.values[first : index - reach]:
            if leaving is not None:
                del window[bisect_left(window, leaving)]
        first, end = index - reach, index + reach + 1
        medians.append(None if value is None else median(window))
    return Series(data.steps, tuple(medians))
