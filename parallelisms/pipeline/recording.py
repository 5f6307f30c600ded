"""From the notes that an observer takes while a list is carried out to the actions with their times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from parallelisms.pipeline.actions import Action
from parallelisms.pipeline.measured import MeasuredAction


class Moment(Enum):
    """The calls of the executor's `Observer`."""

    BEGIN = "begin"
    WAIT = "wait"
    READY = "ready"
    END = "end"


@dataclass(frozen=True, slots=True)
class Note:
    """One call of the executor: when, in seconds, and for a wait on what.

    `host` is when the host made the call; it differs from `time` where a device works on its own.
    """

    moment: Moment
    action: Action
    time: float
    host: float
    transfer: Action | None = None
    peer: int | None = None


@dataclass(slots=True)
class _Entry:
    action: Action
    run: int
    start: float
    end: float | None = None
    wait_start: float | None = None
    wait_end: float | None = None
    waits_for: Action | None = None
    peer: int | None = None
    enqueued: float | None = None
    posted: bool = False  # a send or receive: its first end tells no more than that it is posted


def fold(notes: Iterable[Note], device_works_alone: bool = False) -> tuple[MeasuredAction, ...]:
    """The actions in order of their beginning.

    A compute action makes the notes begin, (wait,) ready, end; all else begin, end. A send makes a second end
    when the executor notices that it is complete, with a wait before it where the executor had to wait.

    Args:
        notes: in the order in which they were taken.
        device_works_alone: keep when the host handed work over (`MeasuredAction.enqueued`).
    """
    entries: list[_Entry] = []
    current: dict[Action, _Entry] = {}  # the latest of each action
    runs: Counter[Action] = Counter()
    last = 0.0
    for note in notes:
        last = max(last, note.time)
        if note.moment is Moment.BEGIN:
            entry = _Entry(note.action, runs[note.action], note.time)
            runs[note.action] += 1
            entries.append(entry)
            current[note.action] = entry
            continue
        entry = current[note.action]
        if note.moment is Moment.WAIT:
            entry.wait_start, entry.waits_for, entry.peer = note.time, note.transfer, note.peer
        elif note.moment is Moment.READY:
            _be_ready(entry, note, current, device_works_alone)
        else:
            _end(entry, note)
    return tuple(_finished(entry, last) for entry in entries)


def _be_ready(entry: _Entry, note: Note, current: dict[Action, _Entry], device_works_alone: bool) -> None:
    entry.start = note.time
    if device_works_alone:
        entry.enqueued = note.host
    if entry.wait_start is not None and entry.waits_for is not None:
        entry.wait_end = note.time
        # The message was there by now.
        receive = current.get(entry.waits_for)
        if receive is not None and receive is not entry:
            receive.end = note.time


def _end(entry: _Entry, note: Note) -> None:
    kind = entry.action.kind
    if (kind.is_send or kind.is_receive) and not entry.posted:
        entry.posted = True
        return
    entry.end = note.time
    if kind.is_send and entry.wait_start is not None:
        entry.wait_end = note.time


def _finished(entry: _Entry, last: float) -> MeasuredAction:
    return MeasuredAction(
        entry.action,
        entry.start,
        last if entry.end is None else entry.end,
        entry.run,
        entry.wait_start,
        entry.wait_end,
        entry.waits_for,
        entry.peer,
        entry.enqueued,
    )
