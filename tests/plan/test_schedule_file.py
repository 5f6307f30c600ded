"""A schedule from a file decides placement and microbatches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from parallelisms.pipeline.csv import write_csv
from parallelisms.pipeline.factory import build_schedule
from parallelisms.pipeline.schedules.catalogue import find
from parallelisms.pipeline.setting import Costs, Placement, Setting
from trainer.config.schema import Config
from trainer.errors import ConfigurationError
from trainer.plan.plan import make_plan


def file_of(folder: Path, name: str, ranks: int, microbatches: int) -> Path:
    placement = find(name).place(ranks)
    schedule = build_schedule(name, Setting(placement, microbatches, Costs.equal(placement.stages)))
    path = folder / "schedule.csv"
    write_csv(schedule.actions, path)
    return path


def config_with(path: Path, degree: int, **more: Any) -> Config:
    experimental = {"pipeline_parallel_degree": degree, "pipeline_parallel_schedule_csv": str(path)}
    training = {"seq_len": 16, "mixed_precision_param": "float32", **more}
    return Config.model_validate({"experimental": experimental, "training": training})


def test_a_v_shaped_file_keeps_its_placement_and_its_microbatches(tmp_path: Path) -> None:
    path = file_of(tmp_path, "ZBVZeroBubble", 2, 5)
    plan = make_plan(config_with(path, 2), 2)
    assert plan.schedule.name == "CSV"
    assert plan.schedule.placement == Placement.v_shaped(2)
    assert plan.rows == (2, 2, 2, 1, 1)
    assert plan.splits_backward


def test_a_file_with_validation_still_validates_forward_only(tmp_path: Path) -> None:
    config = config_with(file_of(tmp_path, "1F1B", 2, 4), 2).model_dump()
    config["validation"] |= {"enable": True, "batch_size": 3}
    plan = make_plan(Config.model_validate(config), 2)
    assert plan.validation is not None
    assert len(plan.validation.rows) == 3


def test_a_file_for_other_ranks_is_refused_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"for 2 ranks, pipeline_parallel_degree is 4"):
        make_plan(config_with(file_of(tmp_path, "1F1B", 2, 4), 4), 4)


def test_a_file_with_more_microbatches_than_sequences_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"4 microbatches, training\.batch_size is 2"):
        make_plan(config_with(file_of(tmp_path, "1F1B", 2, 4), 2, batch_size=2), 2)
