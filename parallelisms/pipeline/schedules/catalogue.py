"""Every schedule by name. A family is a constant of its own file; this is the table of them."""

from __future__ import annotations

import difflib
import re

from parallelisms.pipeline.errors import UnknownScheduleError
from parallelisms.pipeline.schedules import (
    auto,
    dualpipev,
    gpipe,
    interleaved,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    v_schedules,
    zbv,
    zero_bubble,
)
from parallelisms.pipeline.schedules.family import ScheduleFamily

__all__ = ["FAMILIES", "ScheduleFamily", "find", "names"]

FAMILIES: tuple[ScheduleFamily, ...] = (
    gpipe.FAMILY,
    one_f_one_b.FAMILY,
    interleaved.FAMILY,
    looped_bfs.FAMILY,
    *zero_bubble.FAMILIES,
    interleaved_zero_bubble.FAMILY,
    zbv.FAMILY,
    dualpipev.FAMILY,
    *v_schedules.FAMILIES,
    auto.FAMILY,
)


def names() -> tuple[str, ...]:
    """The canonical names, in the order of the table."""
    return tuple(family.name for family in FAMILIES)


def find(name: str) -> ScheduleFamily:
    """The family of a name or alias; case, spaces, hyphens and underscores do not matter.

    Raises UnknownScheduleError with the nearest name and all of them.
    """
    wanted = _plain(name)
    known = {_plain(spelling): family for family in FAMILIES for spelling in (family.name, *family.aliases)}
    if wanted in known:
        return known[wanted]
    nearest = difflib.get_close_matches(wanted, list(known), n=1, cutoff=0.5)
    hint = f"; did you mean {known[nearest[0]].name!r}?" if nearest else "."
    raise UnknownScheduleError(f"no pipeline schedule is called {name!r}{hint} Known: {', '.join(names())}")


def _plain(name: str) -> str:
    # torch's classes are called Schedule1F1B and so on, its users write both.
    return re.sub(r"[\s_\-]", "", name).lower().removeprefix("schedule")
