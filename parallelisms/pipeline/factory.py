"""The only way to a schedule: generate or read it, add communication, prove it, predict it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from parallelisms.pipeline.actions import ActionLists
from parallelisms.pipeline.communicate import add_communication, compute_only
from parallelisms.pipeline.csv import has_communication, microbatches_of, placement_of, read_csv
from parallelisms.pipeline.errors import IllegalSettingError, MemoryCapError
from parallelisms.pipeline.schedules import one_f_one_b
from parallelisms.pipeline.schedules.catalogue import find
from parallelisms.pipeline.schedules.forward_only import forward_only as forwards_alone
from parallelisms.pipeline.setting import Placement, Setting
from parallelisms.pipeline.sharding import add_sharding
from parallelisms.pipeline.simulate import Prediction, simulate
from parallelisms.pipeline.verify import Proof, verify


@dataclass(frozen=True)
class PipelineSchedule:
    """A proven schedule: `actions[rank]` is exactly what the rank carries out."""

    name: str
    placement: Placement
    microbatches: int
    actions: ActionLists
    proof: Proof
    prediction: Prediction


def build_schedule(
    name: str,
    setting: Setting,
    *,
    csv: str | Path | None = None,
    sharded: bool = False,
    forward_only: bool = False,
) -> PipelineSchedule:
    """The schedule of a name, or of a file, for a setting; always verified.

    Args:
        name: of the catalogue, in any case; ignored when `csv` is given.
        setting: ranks, stages, microbatches, costs and memory cap.
        csv: a file in torch's format, with or without communication, whose stages and microbatches are the
            setting's (`csv.placement_of`, `csv.microbatches_of`).
        sharded: stages gather their parameters and reduce their gradients (FSDP).
        forward_only: the lists for validation, under any schedule.

    Raises:
        ScheduleError: a subclass for each reason.
    """
    if csv is not None:
        title, lists = "CSV", () if forward_only else _read(csv, setting, sharded)
    else:
        family = find(name)
        # On one stage every schedule is the same: there is nothing to overlap.
        chosen = family if setting.stages > 1 else one_f_one_b.FAMILY
        chosen.check(setting)
        title, lists = family.name, () if forward_only else chosen.generate(setting)
    if forward_only:
        lists = forwards_alone(setting)
    if not has_communication(lists):
        lists = add_communication(compute_only(lists), setting.placement, sharded)
    elif sharded and all(action.kind.has_microbatch for actions in lists for action in actions):
        lists = add_sharding(lists)
    proof = verify(lists, setting.placement, setting.microbatches, forward_only, sharded)
    _check_memory(title, proof, setting)
    prediction = simulate(lists, setting.placement, setting.costs)
    return PipelineSchedule(title, setting.placement, setting.microbatches, lists, proof, prediction)


def _read(path: str | Path, setting: Setting, sharded: bool) -> ActionLists:
    lists = read_csv(path)
    placement = placement_of(lists)
    if placement != setting.placement:
        raise IllegalSettingError(
            f"the schedule file {path} has stages on ranks {list(placement.owners)}, "
            f"the configuration has them on ranks {list(setting.placement.owners)}"
        )
    if microbatches_of(lists) != setting.microbatches:
        raise IllegalSettingError(
            f"the schedule file {path} is for {microbatches_of(lists)} microbatches, "
            f"the configuration has {setting.microbatches}"
        )
    if sharded:
        return lists
    # torch writes the actions of sharded parameters into every file; without sharding they mean nothing.
    return tuple(tuple(action for action in actions if action.kind.has_microbatch) for actions in lists)


def _check_memory(title: str, proof: Proof, setting: Setting) -> None:
    if setting.memory_cap is None:
        return
    share = max(proof.peak_share)
    if share > setting.memory_cap + 1e-9:
        rank = proof.peak_share.index(share)
        raise MemoryCapError(
            f"{title} holds the activations of {share:.4g} microbatches on rank {rank}, over the limit of "
            f"{setting.memory_cap:.4g} (experimental.pipeline_parallel_memory_limit); "
            f"a schedule that holds fewer (Auto, V-Half, V-Min), or a higher limit, is needed"
        )
