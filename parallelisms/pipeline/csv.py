"""Schedules as files in the format of torch.distributed.pipelining: a row for each rank, a cell for each action.

Empty cells (idle slots) are skipped. What torch writes for a forward and a backward that overlap,
`(2F3;1B0)OVERLAP_F_B`, is read as the two actions one after the other.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from parallelisms.pipeline.actions import Action, ActionLists, ActionSyntaxError
from parallelisms.pipeline.errors import CsvError
from parallelisms.pipeline.setting import Placement

_OVERLAP = "OVERLAP_F_B"


def read_csv(path: str | Path) -> ActionLists:
    """The lists of a file, compute only or with communication. Raises CsvError with file, row and cell."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise CsvError(f"the schedule file {path} cannot be read: {error}") from error
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    if not rows:
        raise CsvError(f"the schedule file {path} is empty: a row of actions for each rank is expected")
    return tuple(tuple(_row(path, rank, row)) for rank, row in enumerate(rows))


def _row(path: str | Path, rank: int, row: list[str]) -> Iterator[Action]:
    for column, cell in enumerate(row):
        for text in _parts(cell.strip()):
            try:
                yield Action.parse(text)
            except ActionSyntaxError as error:
                raise CsvError(f"{path}, row {rank + 1}, cell {column + 1}: {error}") from error


def _parts(cell: str) -> list[str]:
    if cell.startswith("(") and cell.endswith(")" + _OVERLAP):
        return [part.strip() for part in cell[1 : -len(_OVERLAP) - 1].split(";")]
    return [cell] if cell else []


def write_csv(lists: ActionLists, path: str | Path) -> None:
    """Write the lists so that torch's runtime and `read_csv` can load them. Raises CsvError."""
    try:
        with open(path, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([str(action) for action in actions] for actions in lists)
    except OSError as error:
        raise CsvError(f"the schedule file {path} cannot be written: {error}") from error


def has_communication(lists: ActionLists) -> bool:
    """Whether there is any send or receive."""
    return any(action.kind.is_send or action.kind.is_receive for actions in lists for action in actions)


def placement_of(lists: ActionLists) -> Placement:
    """Which rank computes each stage. Raises CsvError for a stage on two ranks or on none."""
    owners: dict[int, int] = {}
    for rank, actions in enumerate(lists):
        for action in actions:
            owner = owners.setdefault(action.stage, rank)
            if owner != rank:
                raise CsvError(
                    f"stage {action.stage} is on rank {owner} and, by {action}, on rank {rank}: "
                    f"a stage belongs to one rank"
                )
        if not actions:
            raise CsvError(f"rank {rank} has no actions")
    missing = sorted(set(range(max(owners, default=-1) + 1)) - set(owners))
    if missing:
        raise CsvError(f"no rank has actions of stage {missing[0]}")
    return Placement(tuple(owners[stage] for stage in range(len(owners))))


def microbatches_of(lists: ActionLists) -> int:
    """How many microbatches the lists name."""
    named = (action.microbatch for actions in lists for action in actions)
    return 1 + max((each for each in named if each is not None), default=-1)
