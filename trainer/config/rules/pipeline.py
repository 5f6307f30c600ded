"""Rules of the pipeline keys in [experimental]."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from parallelisms.pipeline.errors import UnknownScheduleError
from parallelisms.pipeline.schedules import catalogue
from parallelisms.pipeline.schedules.family import ScheduleFamily
from parallelisms.pipeline.split import is_layer
from trainer.config.report import Problem, nearest, nearest_number
from trainer.config.rules.model import sizes_of
from trainer.config.schema import Config

_DEGREE = "experimental.pipeline_parallel_degree"
_SCHEDULE = "experimental.pipeline_parallel_schedule"
_CSV = "experimental.pipeline_parallel_schedule_csv"
_POINTS = "experimental.pipeline_parallel_split_points"
_LAYERS = "experimental.pipeline_parallel_layers_per_stage"
_STAGES = "experimental.pipeline_parallel_stages_per_rank"
_MICROBATCHES = "experimental.pipeline_parallel_microbatches"


def schedule_is_known(config: Config, _world_size: int | None) -> Iterator[Problem]:
    """The schedule is in the catalogue, in any spelling."""
    name = config.experimental.pipeline_parallel_schedule
    if _schedule(config) is None:
        names = catalogue.names()
        near = nearest(name, names, cutoff=0.5)
        yield Problem((_SCHEDULE,), "there is no such schedule", f"one of {', '.join(names)}", near)


def schedule_file_exists(config: Config, _world_size: int | None) -> Iterator[Problem]:
    """The file of a schedule of one's own is there. The plan proves what is in it."""
    name = config.experimental.pipeline_parallel_schedule_csv
    if name is not None and not Path(name).expanduser().is_file():
        yield Problem((_CSV,), "there is no such file", suggestion=nearest_file(name))


def stages_are_decided_once(config: Config, _world_size: int | None) -> Iterator[Problem]:
    """Split points and layers per stage each decide all stages, so only one of them is given."""
    experimental = config.experimental
    if experimental.pipeline_parallel_split_points and experimental.pipeline_parallel_layers_per_stage:
        yield Problem(
            (_LAYERS, _POINTS),
            "decides the stages, and pipeline_parallel_split_points does so too",
            "one of the two",
            value=experimental.pipeline_parallel_layers_per_stage,
        )


def split_points_are_layers_in_order(config: Config, _world_size: int | None) -> Iterator[Problem]:
    """Each split point is a layer after the first, once, in the order of the model."""
    points, sizes = config.experimental.pipeline_parallel_split_points, sizes_of(config)
    if sizes is None:
        return
    layers = [name for name in sizes.modules() if is_layer(name)]
    allowed = (
        f"layers.1 to {layers[-1]}, in order, each once" if len(layers) > 1 else "none: there is one layer"
    )
    keys = (_POINTS, "model.flavor", "model.name", "model.override.n_layers")
    for point in points:
        if point == layers[0]:
            yield Problem(
                keys, f"{point} is in the first stage already: the embedding alone is no stage", allowed
            )
        elif point not in layers:
            near = _nearest_layer(point, layers)
            yield Problem(keys, f"{point} is no layer of the model", allowed, near)
    known = [layers.index(point) for point in points if point in layers]
    if known != sorted(set(known)):
        right = ",".join(layers[index] for index in sorted(set(known)))
        yield Problem(keys, "layers are out of order or given twice", allowed, f'"{right}"')


def stages_fill_the_ranks_evenly(config: Config, _world_size: int | None) -> Iterator[Problem]:
    """Stages that split points or layers per stage make are a multiple of the ranks, and what is said per rank."""
    experimental, ranks = config.experimental, config.experimental.pipeline_parallel_degree
    stages = _explicit_stages(config)
    if stages is None:
        return
    points = len(experimental.pipeline_parallel_split_points)
    key = _POINTS if points else _LAYERS
    made = f"{points} split points make" if points else "makes"
    keys = (key, _DEGREE, _STAGES, "model.flavor", "model.name", "model.override.n_layers")
    asked = experimental.pipeline_parallel_stages_per_rank
    message = f"{made} {stages} stages"
    if stages % ranks:
        yield Problem(
            keys,
            f"{message}, which {ranks} ranks cannot share evenly",
            f"a multiple of {ranks} stages" + (f": {ranks - 1} or {2 * ranks - 1} points" if points else ""),
        )
    elif asked is not None and stages != ranks * asked:
        yield Problem(
            keys,
            f"{message}, but pipeline_parallel_stages_per_rank = {asked} on {ranks} ranks are {ranks * asked}",
            f"{ranks * asked} stages, or pipeline_parallel_stages_per_rank = {stages // ranks}",
        )


def stages_per_rank_fit_the_schedule(config: Config, _world_size: int | None) -> Iterator[Problem]:
    """One stage per rank for single-stage schedules, two for V schedules, two or more for the others."""
    family, ranks = _schedule(config), config.experimental.pipeline_parallel_degree
    if family is None or any(stages_fill_the_ranks_evenly(config, None)):
        return
    stages = _explicit_stages(config)
    each = config.experimental.pipeline_parallel_stages_per_rank if stages is None else stages // ranks
    if each is None or (each == 1 and ranks == 1 and family.placement != "v"):
        return  # one stage on one rank is no pipeline, whatever the schedule
    if family.single_stage:
        wrong, allowed = each != 1, "1, or a schedule with several, such as Interleaved1F1B"
    elif family.placement == "v":
        wrong, allowed = each != 2, "2"
    else:
        wrong, allowed = (
            each < 2 and family.placement == "loop",
            "2 or more, or a single-stage schedule such as 1F1B",
        )
    if wrong:
        keys = (_STAGES, _POINTS, _LAYERS, _SCHEDULE, _DEGREE)
        yield Problem(
            keys, f"{family.name} does not exist with {each} stage{'s' * (each > 1)} per rank", allowed
        )


def every_stage_has_a_layer(config: Config, _world_size: int | None) -> Iterator[Problem]:
    """There are no more stages than layers."""
    family, sizes = _schedule(config), sizes_of(config)
    if sizes is None or _explicit_stages(config) is not None:
        return
    ranks, each = (
        config.experimental.pipeline_parallel_degree,
        config.experimental.pipeline_parallel_stages_per_rank,
    )
    if each is None:
        each = 1 if ranks == 1 or family is None else family.default_stages_per_rank
    if ranks * each <= sizes.n_layers:
        return
    keys = (_DEGREE, _STAGES, _SCHEDULE, "model.flavor", "model.name", "model.override.n_layers")
    if ranks > sizes.n_layers:
        allowed = f"1 to {sizes.n_layers // each or 1}"
        yield Problem(keys, f"more stages than the model's {sizes.n_layers} layers", allowed, value=ranks)
    else:
        yield Problem(
            keys,
            f"{ranks} ranks × {each} stages per rank are more stages than the model's {sizes.n_layers} layers",
            f"at most {sizes.n_layers} stages",
            value=ranks,
        )


def batch_covers_the_microbatches(config: Config, _world_size: int | None) -> Iterator[Problem]:
    """No microbatch is empty: batch_size is at least the number of microbatches."""
    asked, batch_size = config.experimental.pipeline_parallel_microbatches, config.training.batch_size
    if asked is not None and asked > batch_size:
        yield Problem(
            (_MICROBATCHES, "training.batch_size"),
            f"training.batch_size = {batch_size} cannot be cut into so many microbatches",
            f"1 to {batch_size}, or training.batch_size of {asked} or more",
            value=asked,
        )


def nearest_file(name: str) -> str | None:
    """A file in the same folder whose name is most like the one that is missing."""
    path = Path(name).expanduser()
    if not path.parent.is_dir():
        return None
    near = nearest(path.name, (each.name for each in path.parent.iterdir()))
    return str(path.parent / near) if near else None


def _schedule(config: Config) -> ScheduleFamily | None:
    try:
        return catalogue.find(config.experimental.pipeline_parallel_schedule)
    except UnknownScheduleError:
        return None


def _explicit_stages(config: Config) -> int | None:
    """Stages as split points or layers per stage make them; None without those, or where they are wrong."""
    experimental, sizes = config.experimental, sizes_of(config)
    points = experimental.pipeline_parallel_split_points
    if points:
        return None if any(split_points_are_layers_in_order(config, None)) else len(points) + 1
    per_stage = experimental.pipeline_parallel_layers_per_stage
    return None if per_stage is None or sizes is None else -(-sizes.n_layers // per_stage)


def _nearest_layer(point: str, layers: list[str]) -> str | None:
    number = point.rpartition(".")[2]
    if number.isdecimal() and len(layers) > 1:
        return layers[nearest_number(int(number), range(1, len(layers)))]
    return nearest(point, layers[1:])
