"""Tables and numbers as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

GIB = 1024**3
_MIB = 1024**2


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> list[str]:
    """Lines of columns as wide as they need to be; those at the positions `left` are aligned to the left."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        aligned = (
            f"{cell:<{width}}" if position in left else f"{cell:>{width}}"
            for position, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(aligned).rstrip()

    return [line(head), *map(line, rows)]


@dataclass(frozen=True)
class ByteUnit:
    """A unit in which bytes are shown."""

    name: str
    size: int

    def show(self, count: int) -> str:
        """The number alone."""
        value = count / self.size
        return "0" if count == 0 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def unit_for(largest: int) -> ByteUnit:
    """GiB, or MiB where the largest of some numbers is less than one."""
    return ByteUnit("GiB", GIB) if largest >= GIB else ByteUnit("MiB", _MIB)


def size(count: int) -> str:
    """Bytes for reading."""
    unit = unit_for(count)
    if count == 0:
        return "0"
    return f"{unit.show(count)} {unit.name}"


def flops(count: float) -> str:
    """Operations with the prefix that leaves one to three digits before the point."""
    for factor, prefix in ((1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if count >= factor:
            return f"{count / factor:.3g} {prefix}FLOPs"
    return f"{count:.0f} FLOPs"


def seconds(value: float) -> str:
    """A time for reading."""
    if value >= 1:
        return f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"
    return f"{value * 1000:.3g} ms"
