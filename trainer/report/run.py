"""What is known of a run: everything in its folder, as far as it can be read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import ConfigurationError
from trainer.metrics import FILE_NAME as METRICS
from trainer.report.files import FolderReader
from trainer.report.loose import Loose
from trainer.report.series import Series, series
from trainer.report.timelines import DrawnTimelines, draw_timelines

_MARKS = ("config.toml", "plan.json", METRICS)  # a run folder has at least one of them


@dataclass(frozen=True)
class Curves:
    """What was logged over the steps."""

    loss: Series
    validation_loss: Series
    tokens_per_second: Series
    lr: Series
    grad_norm: Series
    step_seconds: Series
    mfu: Series
    memory_bytes: Series
    tokens: Series
    skipped: int  # logged steps whose update was not made


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        path: its folder.
        name: what it is called in this report; no two runs have the same.
        config: every key as "table.key" with its value; empty if it could not be read.
        plan, environment, failure: what the files hold.
        curves: metrics.jsonl.
        timelines: the pictures of measured steps.
        problems: sentences about what could not be read.
    """

    path: Path
    name: str
    config: dict[str, Loose]
    plan: Loose
    environment: Loose
    failure: Loose
    curves: Curves
    timelines: DrawnTimelines
    problems: tuple[str, ...]

    @property
    def description(self) -> str:
        """What its owner says about it."""
        return self.config.get("job.description", Loose()).string() or ""

    @property
    def last_step(self) -> int | None:
        """The last step that was logged."""
        return self.curves.loss.steps[-1] if self.curves.loss.steps else None

    @property
    def planned_steps(self) -> int | None:
        return self.plan["batch"]["steps"].whole()


def read_runs(folders: Sequence[Path]) -> tuple[Run, ...]:
    """The runs of the folders; one that is named twice is read once.

    Raises ConfigurationError with a line for each folder that is none of a run.
    """
    unique = list({folder.resolve(): folder for folder in folders}.values())
    wrong = [problem for folder in unique if (problem := _problem(folder)) is not None]
    if wrong:
        raise ConfigurationError("\n".join(wrong))
    return tuple(_read(folder, name) for folder, name in zip(unique, _names(unique), strict=True))


def _problem(folder: Path) -> str | None:
    if not folder.exists():
        return f"there is no folder {folder}"
    if not folder.is_dir():
        return f"{folder} is not a folder"
    if not any((folder / mark).exists() for mark in _MARKS):
        *first, last = _MARKS
        return f"{folder} is not the folder of a run: it has neither {', '.join(first)} nor {last}"
    return None


def _names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    length = 1
    while len({path[-length:] for path in parts}) < len(parts):
        length += 1
    return [str(Path(*path[-length:])) for path in parts]


def _read(folder: Path, name: str) -> Run:
    reader = FolderReader(folder)
    config = dict(_flat(reader.toml("config.toml")))
    plan = reader.json("plan.json")
    rows = reader.json_lines(METRICS)
    environment = reader.json("environment.json", expected=False)
    failure = reader.json("failure.json", expected=False)
    timelines = draw_timelines(reader)
    return Run(
        folder, name, config, plan, environment, failure, _curves(rows), timelines, tuple(reader.problems)
    )


def _curves(rows: Sequence[Loose]) -> Curves:
    return Curves(
        loss=series(rows, "loss"),
        validation_loss=series(rows, "validation_loss"),
        tokens_per_second=series(rows, "tokens_per_second"),
        lr=series(rows, "lr"),
        grad_norm=series(rows, "grad_norm"),
        step_seconds=series(rows, "step_seconds"),
        mfu=series(rows, "mfu"),
        memory_bytes=series(rows, "memory_bytes"),
        tokens=series(rows, "tokens"),
        skipped=sum(row["skipped"].value is True for row in rows),
    )


def _flat(data: Loose, prefix: str = "") -> Iterator[tuple[str, Loose]]:
    """Every value that is no table, with its whole name."""
    for key, value in data.members().items():
        if isinstance(value.value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
