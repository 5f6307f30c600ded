"""A measured timeline as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing.

The JSON of the Trace Event Format: one process for each rank, with the tracks compute, send, receive, gather
and reduce, and an arrow from each send to its receive. Slices of one track must not overlap, so transfers that
are on their way at the same time get tracks of their own: "send", "send 2", ...
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from parallelisms.pipeline.actions import Action, Kind
from parallelisms.pipeline.measured import MeasuredAction, RankMeasurement, Timeline

_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "input gradient",
    Kind.BACKWARD_WEIGHT: "weight gradient",
}
# The track of each other kind, in the order in which they are shown.
_TRACKS = {
    Kind.SEND_ACTIVATION: "send",
    Kind.SEND_GRADIENT: "send",
    Kind.RECEIVE_ACTIVATION: "receive",
    Kind.RECEIVE_GRADIENT: "receive",
    Kind.UNSHARD: "gather",
    Kind.RESHARD: "gather",
    Kind.REDUCE_GRADIENT: "reduce",
}
_COMPUTE = "compute"
_ORDER = (_COMPUTE, "send", "receive", "gather", "reduce")
_TRACKS_OF_A_KIND = 1000
_SHORTEST = 1e-3  # microseconds: slices without any length cannot carry an arrow


def trace_text(timeline: Timeline) -> str:
    """The text of the trace, one event on a line."""
    events = ",\n".join(json.dumps(event) for event in trace_events(timeline))
    about = {"step": timeline.step, "schedule": timeline.schedule.name, "clock": timeline.clock_method}
    return f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": [\n{events}\n]}}\n'


def trace_events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """The events of all ranks; times in microseconds from the start of the step."""
    for rank in timeline.ranks:
        yield from _Process(rank, _name(timeline, rank)).events()


def _name(timeline: Timeline, rank: RankMeasurement) -> str:
    stages = ", ".join(map(str, timeline.schedule.placement.stages_of(rank.pipeline_rank)))
    return f"rank {rank.rank} (stages {stages})" if "," in stages else f"rank {rank.rank} (stage {stages})"


class _Process:
    """One rank: its tracks are numbered 1000, 1001, ... for compute, 2000, ... for sends, and so on."""

    def __init__(self, rank: RankMeasurement, name: str) -> None:
        self._rank = rank
        self._name = name
        self._busy_until: dict[int, float] = {}  # by track

    def events(self) -> Iterator[dict[str, Any]]:
        yield self._metadata("process_name", 0, name=self._name)
        yield self._metadata("process_sort_index", 0, sort_index=self._rank.rank)
        slices = []
        for each in sorted(self._rank.actions, key=lambda each: each.came):
            slices += list(self._slices(each))
        for track in sorted(self._busy_until):
            kind, copy = divmod(track, _TRACKS_OF_A_KIND)
            title = _ORDER[kind - 1] + (f" {copy + 1}" if copy else "")
            yield self._metadata("thread_name", track, name=title)
            yield self._metadata("thread_sort_index", track, sort_index=track)
        yield from slices

    def _metadata(self, what: str, track: int, **arguments: Any) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": self._rank.rank, "tid": track, "args": arguments}

    def _slices(self, each: MeasuredAction) -> Iterator[dict[str, Any]]:
        kind = each.action.kind
        if kind.is_compute:
            yield from self._compute(each)
        elif kind.is_send:
            slice_ = self._slice(
                each, _TRACKS[kind], each.start, each.end, str(each.action), kind.name.lower()
            )
            yield slice_
            yield self._flow("s", slice_, each, _message(each.action, each.run, self._rank.replica))
        elif kind.is_receive:
            slice_ = self._slice(
                each, _TRACKS[kind], each.start, each.end, str(each.action), kind.name.lower()
            )
            yield slice_
            yield self._flow("f", slice_, each, _message(each.action, each.run, self._rank.replica))
        else:
            yield self._slice(each, _TRACKS[kind], each.start, each.end, str(each.action), kind.name.lower())
        if not kind.is_compute and each.wait_start is not None and each.wait_end is not None:
            yield self._slice(each, _COMPUTE, each.wait_start, each.wait_end, f"wait {each.action}", "wait")

    def _compute(self, each: MeasuredAction) -> Iterator[dict[str, Any]]:
        if each.wait_start is not None and each.wait_end is not None:
            name = f"wait {each.waits_for}"
            yield self._slice(each, _COMPUTE, each.wait_start, each.wait_end, name, "wait")
        yield self._slice(each, _COMPUTE, each.start, each.end, str(each.action), _NAMES[each.action.kind])

    def _slice(
        self, each: MeasuredAction, track: str, start: float, end: float, name: str, category: str
    ) -> dict[str, Any]:
        begin, until = start * 1e6, end * 1e6
        arguments: dict[str, Any] = {"stage": each.action.stage, "run": each.run}
        if each.action.microbatch is not None:
            arguments["microbatch"] = each.action.microbatch
        if each.peer is not None:
            arguments["peer"] = each.peer
        return {
            "ph": "X",
            "name": name,
            "cat": category,
            "pid": self._rank.rank,
            "tid": self._free_track(track, begin, until),
            "ts": round(begin, 3),
            "dur": round(max(until - begin, _SHORTEST), 3),
            "args": arguments,
        }

    def _free_track(self, name: str, begin: float, until: float) -> int:
        """The first track of the name on which nothing is under way."""
        track = _TRACKS_OF_A_KIND * (1 + _ORDER.index(name))
        while self._busy_until.get(track, 0.0) > begin + _SHORTEST:
            track += 1
        self._busy_until[track] = until
        return track

    def _flow(
        self, phase: str, slice_: dict[str, Any], each: MeasuredAction, identity: str
    ) -> dict[str, Any]:
        """An arrow begins where its send begins and ends where its receive does."""
        at = slice_["ts"] if phase == "s" else round(slice_["ts"] + slice_["dur"] - _SHORTEST / 2, 4)
        event = {
            "ph": phase,
            "name": "message",
            "cat": "message",
            "id": identity,
            "pid": slice_["pid"],
            "tid": slice_["tid"],
            "ts": at,
        }
        return event if phase == "s" else {**event, "bp": "e"}


def _message(action: Action, run: int, replica: int) -> str:
    """The same for both sides of a message: named after the stage that receives it."""
    stage = action.stage
    if action.kind is Kind.SEND_ACTIVATION:
        stage += 1
    elif action.kind is Kind.SEND_GRADIENT:
        stage -= 1
    forward = action.kind in (Kind.SEND_ACTIVATION, Kind.RECEIVE_ACTIVATION)
    payload = "F" if forward else "B"
    chunk = "" if action.chunk is None else f".{action.chunk}"
    return f"{replica}/{run}/{stage}{payload}{action.microbatch}{chunk}"
