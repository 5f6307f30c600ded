"""`timeline/step-N.json`: a measured timeline as a file that explains itself.

All times are seconds; of a step they count from when the first rank came to its first action, on the clock of
rank 0. The format, version 1:

    {"format": 1,
     "step": 3,                            number of the optimizer step
     "clock": {"method": "...",            how the clocks of devices and ranks were brought together
               "bound_seconds": 4e-05},    times of two ranks are off against each other by at most this
     "schedule": {"name": "1F1B",
                  "owners": [0, 1],        the pipeline rank of each stage
                  "microbatches": 8,
                  "runs": 1,               how often it was carried out in the step (gradient accumulation)
                  "actions": ["0F0 0SEND_F0 ...", ...]},     of each pipeline rank, in order
     "plan": {"costs": {...},              of the plan, scaled to seconds by one factor: for each stage
                                           "forward", "backward_input", "backward_weight"; "transfer"
              "step_seconds": ..., "bound_seconds": ..., "step_bubble": ..., "rank_bubbles": [...],
              "peak_activations": [...],   of single stages, for each pipeline rank
              "spans": [[{"action": "0F0", "start": ..., "end": ...}, ...], ...]},  for each pipeline rank;
                                           microbatches of run r are counted from r * microbatches
     "prediction": {...},                  the same with the costs measured in this step (`costs.measured_costs`)
     "measured": {...},                    the figures of the first pipeline: "step_seconds", "bound_seconds",
                                           "step_bubble", "rank_bubbles", "peak_activations", and for each
                                           rank "waiting_seconds", "exposed_communication_seconds"
     "ranks": [{"rank": 0, "pipeline_rank": 0,
                "replica": 0,              data-parallel rank: equal for the ranks of one pipeline
                "host": "...", "device": "cpu",
                "clock_bound_seconds": 0.0,  against rank 0
                "actions": [{"action": "0F0", "run": 0,
                             "start": ..., "end": ...,
                             "wait_start": ..., "wait_end": ...,     where the rank stood still for it
                             "waits_for": "1RECV_F0", "peer": 0,     a transfer, with which global rank
                             "enqueued": ...}, ...]}, ...]}          on an accelerator: by the host

What `start` and `end` mean for each kind of action is said in `measured.MeasuredAction`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from parallelisms.pipeline.actions import Action
from parallelisms.pipeline.costs import measured_costs
from parallelisms.pipeline.figures import Figures, measured_figures
from parallelisms.pipeline.measured import MeasuredAction, MeasuredSchedule, RankMeasurement, Timeline
from parallelisms.pipeline.setting import Costs, Placement
from parallelisms.pipeline.simulate import Prediction

FORMAT = 1


class TimelineFileError(ValueError):
    """A file is no timeline, or one of a version that this program does not know; the text says which."""


def read_timeline(path: str | Path) -> Timeline:
    """The timeline of a file. Raises TimelineFileError."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise TimelineFileError(f"the timeline {path} cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise TimelineFileError(f"{path} is not JSON: {error}") from error
    version = data.get("format") if isinstance(data, dict) else None
    if version != FORMAT:
        raise TimelineFileError(f"{path} is not a timeline of format {FORMAT}: its format is {version!r}")
    try:
        return _timeline(data)
    except (KeyError, TypeError, ValueError) as error:
        raise TimelineFileError(f"{path} is not a whole timeline: {type(error).__name__}: {error}") from error


def timeline_text(timeline: Timeline) -> str:
    """The text of the file, one line for each rank."""
    schedule = timeline.schedule
    costs = measured_costs(timeline)
    head: dict[str, Any] = {
        "format": FORMAT,
        "step": timeline.step,
        "clock": {"method": timeline.clock_method, "bound_seconds": _rounded(timeline.clock_bound)},
        "schedule": {
            "name": schedule.name,
            "owners": list(schedule.placement.owners),
            "microbatches": schedule.microbatches,
            "runs": schedule.runs,
            "actions": [" ".join(map(str, actions)) for actions in schedule.actions],
        },
        "plan": _prediction_data(timeline.plan_costs, timeline.plan()),
        "prediction": _prediction_data(costs, schedule.simulate(costs)),
        "measured": _figures_data(measured_figures(timeline, timeline.replicas[0])),
    }
    parts = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    ranks = ",\n".join(json.dumps(_rank_data(each)) for each in timeline.ranks)
    return "{" + ",\n".join([*parts, f'"ranks": [\n{ranks}\n]']) + "}\n"


def _prediction_data(costs: Costs, prediction: Prediction) -> dict[str, Any]:
    return {
        "costs": asdict(costs),
        "step_seconds": _rounded(prediction.step),
        "bound_seconds": _rounded(prediction.bound),
        "step_bubble": _rounded(prediction.step_bubble),
        "rank_bubbles": [_rounded(each) for each in prediction.rank_bubbles],
        "peak_activations": list(prediction.peak_activations),
        "spans": [
            [{"action": str(s.action), "start": _rounded(s.start), "end": _rounded(s.end)} for s in spans]
            for spans in prediction.spans
        ],
    }


def _figures_data(figures: Figures) -> dict[str, Any]:
    return {
        "step_seconds": _rounded(figures.step),
        "bound_seconds": _rounded(figures.bound),
        "step_bubble": _rounded(figures.step_bubble),
        "rank_bubbles": [_rounded(each) for each in figures.rank_bubbles],
        "peak_activations": list(figures.peak_activations),
        "waiting_seconds": [_rounded(each) for each in figures.waiting],
        "exposed_communication_seconds": [_rounded(each) for each in figures.exposed],
    }


def _rank_data(rank: RankMeasurement) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "pipeline_rank": rank.pipeline_rank,
        "replica": rank.replica,
        "host": rank.host,
        "device": rank.device,
        "clock_bound_seconds": _rounded(rank.clock_bound),
        "actions": [dict(_action_data(each)) for each in rank.actions],
    }


def _action_data(each: MeasuredAction) -> Iterator[tuple[str, Any]]:
    yield "action", str(each.action)
    yield "run", each.run
    yield "start", _rounded(each.start)
    yield "end", _rounded(each.end)
    for name, value in (
        ("wait_start", each.wait_start),
        ("wait_end", each.wait_end),
        ("enqueued", each.enqueued),
    ):
        if value is not None:
            yield name, _rounded(value)
    if each.waits_for is not None:
        yield "waits_for", str(each.waits_for)
    if each.peer is not None:
        yield "peer", each.peer


def _rounded(seconds: float) -> float:
    return round(seconds, 9) + 0.0  # never -0.0


def _timeline(data: dict[str, Any]) -> Timeline:
    schedule = data["schedule"]
    return Timeline(
        step=data["step"],
        clock_method=data["clock"]["method"],
        clock_bound=data["clock"]["bound_seconds"],
        schedule=MeasuredSchedule(
            schedule["name"],
            Placement(tuple(schedule["owners"])),
            schedule["microbatches"],
            schedule["runs"],
            tuple(tuple(Action.parse(text) for text in line.split()) for line in schedule["actions"]),
        ),
        plan_costs=_read_costs(data["plan"]["costs"]),
        ranks=tuple(_read_rank(rank) for rank in data["ranks"]),
    )


def _read_costs(data: dict[str, Any]) -> Costs:
    return Costs(
        tuple(data["forward"]),
        tuple(data["backward_input"]),
        tuple(data["backward_weight"]),
        data["transfer"],
    )


def _read_rank(data: dict[str, Any]) -> RankMeasurement:
    return RankMeasurement(
        data["rank"],
        data["pipeline_rank"],
        data["replica"],
        data["host"],
        data["device"],
        data["clock_bound_seconds"],
        tuple(_read_action(each) for each in data["actions"]),
    )


def _read_action(data: dict[str, Any]) -> MeasuredAction:
    waits_for = data.get("waits_for")
    return MeasuredAction(
        Action.parse(data["action"]),
        data["start"],
        data["end"],
        data["run"],
        data.get("wait_start"),
        data.get("wait_end"),
        None if waits_for is None else Action.parse(waits_for),
        data.get("peer"),
        data.get("enqueued"),
    )
