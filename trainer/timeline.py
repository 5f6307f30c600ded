"""The timeline of a step: collected from all ranks, and written into the run folder by rank 0."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

import torch.distributed as dist

from parallelisms.layout import Layout
from parallelisms.pipeline.assemble import RankReport, assemble
from parallelisms.pipeline.clocks import measure_offset
from parallelisms.pipeline.factory import PipelineSchedule
from parallelisms.pipeline.measured import RankTimeline, Timeline
from parallelisms.pipeline.picture import duration
from parallelisms.pipeline.picture_build import picture_of_timeline
from parallelisms.pipeline.picture_svg import draw_svg
from parallelisms.pipeline.timeline_file import timeline_text
from parallelisms.pipeline.trace import trace_text

logger = logging.getLogger(__name__)

FOLDER = "timeline"  # in the run folder
_MOST_RANKS = 512  # of a larger job some pipelines are collected: its file could not be read


def write_timeline(
    run_folder: Path,
    step: int,
    measured: RankTimeline,
    schedule: PipelineSchedule,
    layout: Layout,
    *,
    group: dist.ProcessGroup | None = None,
) -> Timeline | None:
    """Bring the ranks' recordings of a step onto one clock and write them. Collective over all ranks.

    Writes `timeline/step-N.json`, `.trace.json` and `.svg`, each at once or not at all. A file that cannot be
    written is reported in the log and does not end the training.

    Args:
        run_folder: the job's.
        step: number of the optimizer step.
        measured: what `TimelineRecorder.stop` returned on this rank.
        schedule: what the executor carried out, once or several times.
        layout: who sits where.
        group: all ranks of the job, with a backend for CPU tensors; None for the default group.

    Returns:
        On rank 0 the timeline, elsewhere nothing.
    """
    _log_actions(step, measured)
    ranks = collected_ranks(layout)
    rank = dist.get_rank()
    report = None
    if rank in ranks:
        offset = measure_offset(ranks, group)
        report = RankReport(
            rank,
            layout.pipeline_rank(rank),
            layout.pipeline_index(rank),
            socket.gethostname(),
            _boot(),
            offset,
            measured,
        )
    reports: list[RankReport | None] = [None] * layout.world_size
    dist.gather_object(report, reports if rank == 0 else None, dst=0, group=group)
    if rank != 0:
        return None
    timeline = assemble(step, [each for each in reports if each is not None], schedule)
    try:
        _write(run_folder / FOLDER, timeline)
    except OSError as error:
        logger.warning("the timeline of step %d could not be written: %s", step, error)
    return timeline


def collected_ranks(layout: Layout) -> tuple[int, ...]:
    """The ranks whose recordings are kept: all, or in a large job those of evenly chosen pipelines."""
    pipelines = min(layout.ranks_of_a_stage, max(1, _MOST_RANKS // layout.pipeline))
    chosen = {index * layout.ranks_of_a_stage // pipelines for index in range(pipelines)}
    return tuple(rank for rank in range(layout.world_size) if layout.pipeline_index(rank) in chosen)


def _write(folder: Path, timeline: Timeline) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    name = f"step-{timeline.step}"
    _write_whole(folder / f"{name}.svg", draw_svg(picture_of_timeline(timeline, timeline.replicas[0])))
    _write_whole(folder / f"{name}.trace.json", trace_text(timeline))
    # Last: who finds it finds the others.
    _write_whole(folder / f"{name}.json", timeline_text(timeline))
    logger.info("timeline of step %d: %s", timeline.step, folder / f"{name}.svg")


def _write_whole(path: Path, text: str) -> None:
    """Readers see the whole file or none."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _log_actions(step: int, measured: RankTimeline) -> None:
    """What this rank did, with the times of its device: written when they are known, not when work is enqueued."""
    if not logger.isEnabledFor(logging.DEBUG):
        return
    for each in measured.actions:
        if each.action.kind.is_compute:
            waited = f" after waiting {duration(each.waited)} for {each.waits_for}" if each.waited > 0 else ""
            logger.debug(
                "step %d: %s took %s on %s%s",
                step,
                each.action,
                duration(each.seconds),
                measured.device,
                waited,
            )


def _boot() -> str:
    """Equal for processes that share a monotonic clock: the identity of this boot of this host."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
