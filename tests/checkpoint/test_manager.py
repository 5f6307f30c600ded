"""When a checkpoint is saved and which one a run goes on from, on one process without a process group."""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoint.tiny import MODULES, Layout, Run, Stage, manager
from trainer.checkpoint.manifest import InvalidCheckpoint
from trainer.checkpoint.metadata import METADATA_NAME
from trainer.checkpoint.state import from_bytes
from trainer.checkpoint.storage import CheckpointReader
from trainer.errors import ConfigurationError


def run_and_save(folder: Path, steps: int, **changed: Any) -> Run:
    """Train, offering to save after every step."""
    run, checkpoints = Run(Layout(), 0), manager(folder, **changed)
    for _ in range(steps):
        run.train()
        checkpoints.maybe_save(run.step, run.state, last=run.step == steps)
    return run


def load(folder: Path, **changed: Any) -> tuple[Run, int | None]:
    run = Run(Layout(), 0)
    return run, manager(folder, **changed).load(run.state)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def damage(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 1
    path.write_bytes(contents)


def assert_same(run: Run, other: Run) -> None:
    np.testing.assert_equal(run.snapshot(), other.snapshot())


# When


def test_a_checkpoint_is_saved_at_each_interval_and_at_the_last_step(tmp_path: Path) -> None:
    run_and_save(tmp_path, 5, interval=2)
    assert names(tmp_path) == {"step-2", "step-4", "step-5"}


def test_a_last_step_on_the_interval_is_saved_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    run, checkpoints = Run(Layout(), 0), manager(tmp_path, interval=1)
    run.train()
    assert str(checkpoints.maybe_save(1, run.state)) == str(tmp_path / "step-1")
    assert checkpoints.maybe_save(1, run.state, last=True) is None
    assert len([record for record in caplog.records if "saved in" in record.message]) == 1


def test_an_interval_of_seconds_counts_from_the_last_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    run, checkpoints = Run(Layout(), 0), manager(tmp_path, interval=10, interval_type="seconds")
    saved = []
    for step in range(1, 8):
        clock[0] += 4.0
        if checkpoints.maybe_save(step, run.state):
            saved.append(step)
    assert saved == [3, 6]


def test_nothing_is_saved_or_loaded_unless_enabled(tmp_path: Path) -> None:
    run_and_save(tmp_path, 2, enable_checkpoint=False)
    assert names(tmp_path) == set()
    run_and_save(tmp_path, 2)
    assert load(tmp_path, enable_checkpoint=False)[1] is None


def test_only_the_latest_k_are_kept(tmp_path: Path) -> None:
    run_and_save(tmp_path, 5, interval=1, keep_latest_k=2)
    assert names(tmp_path) == {"step-4", "step-5"}


# Which


def test_a_first_start_has_nothing_to_load(tmp_path: Path) -> None:
    assert load(tmp_path / "checkpoint")[1] is None


def test_the_latest_checkpoint_restores_everything(tmp_path: Path) -> None:
    saved = run_and_save(tmp_path, 4)
    loaded, step = load(tmp_path)
    assert step == 4
    assert_same(loaded, saved)


@pytest.mark.parametrize(
    ("part", "fresh"), [("optimizer", "optimizer"), ("lr_scheduler", "lr"), ("dataloader", "document")]
)
def test_a_part_that_is_excluded_stays_as_it_was_and_the_others_are_loaded(
    tmp_path: Path, part: str, fresh: str
) -> None:
    saved, new = run_and_save(tmp_path, 4), Run(Layout(), 0)
    loaded, step = load(tmp_path, exclude_from_loading=(part,))
    assert step == 4
    snapshot = loaded.snapshot()
    for key, value in snapshot.items():
        np.testing.assert_equal(value, (new if key == fresh else saved).snapshot()[key])
    assert str(saved.snapshot()[fresh]) != str(new.snapshot()[fresh])


def test_rates_and_decay_after_a_resume_are_those_of_a_straight_run(tmp_path: Path) -> None:
    """Case C2."""
    straight = Run(Layout(), 0)
    seen: list[tuple[float, float]] = []
    for _ in range(8):
        straight.train()
        group = straight.state.optimizer.param_groups[0]
        seen.append((group["lr"], group["weight_decay"]))
    run_and_save(tmp_path, 4)
    resumed, step = load(tmp_path)
    assert step == 4
    resumed.step = step
    for expected in seen[4:]:
        resumed.train()
        group = resumed.state.optimizer.param_groups[0]
        assert (group["lr"], group["weight_decay"]) == expected
    assert_same(resumed, straight)


def test_a_changed_weight_decay_in_the_configuration_takes_effect(tmp_path: Path) -> None:
    run_and_save(tmp_path, 2)
    run = Run(Layout(), 0)
    run.state.optimizer.param_groups[0]["weight_decay"] = 0.5
    manager(tmp_path).load(run.state)
    assert run.state.optimizer.param_groups[0]["weight_decay"] == 0.5


@pytest.mark.parametrize("fault", ["no manifest", "missing file", "cut file", "flipped bit", "cut manifest"])
def test_an_invalid_checkpoint_is_named_and_passed_over(
    tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    run_and_save(tmp_path, 4)
    latest = tmp_path / "step-4"
    match fault:
        case "no manifest":
            (latest / "manifest.json").unlink()
        case "missing file":
            (latest / "__0_0.distcp").unlink()
        case "cut file":
            os.truncate(latest / "__0_0.distcp", 100)
        case "flipped bit":
            damage(latest / "__0_0.distcp")
        case "cut manifest":
            os.truncate(latest / "manifest.json", 100)
    run, step = load(tmp_path)
    assert step == 2
    assert run.state.counters["tokens"] == 128
    assert "PASSED OVER" in caplog.text
    assert str(latest) in caplog.text


def test_sizes_alone_are_verified_where_that_is_chosen(tmp_path: Path) -> None:
    run_and_save(tmp_path, 2)
    damage(tmp_path / "step-2" / "__0_0.distcp")
    assert manager(tmp_path, verify="sizes")._open_latest() is not None
    assert manager(tmp_path)._open_latest() is None


def test_leftovers_of_a_crash_are_removed_at_the_start_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_and_save(tmp_path, 2)
    (tmp_path / "step-4.partial").mkdir()
    assert load(tmp_path)[1] == 2
    assert names(tmp_path) == {"step-2"}
    assert "step-4.partial" in caplog.text


def test_a_configured_step_is_loaded_and_later_ones_are_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_and_save(tmp_path, 6)
    run, step = load(tmp_path, load_step=2)
    assert step == 2
    assert run.state.data.document == 6
    assert "later steps (6, 4) are left alone" in caplog.text
    assert names(tmp_path) == {"step-2", "step-4", "step-6"}


def test_a_configured_step_that_is_not_there_is_an_error_that_lists_those_that_are(tmp_path: Path) -> None:
    run_and_save(tmp_path, 4)
    with pytest.raises(ConfigurationError, match=r"no checkpoint of step 3 in .*; valid ones there: 4, 2"):
        load(tmp_path, load_step=3)


def test_a_configured_step_that_is_damaged_is_an_error(tmp_path: Path) -> None:
    run_and_save(tmp_path, 4)
    damage(tmp_path / "step-2" / "__0_0.distcp")
    with pytest.raises(ConfigurationError, match=r"step-2 is not valid: __0_0.distcp is damaged"):
        load(tmp_path, load_step=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "wider",
            r"is of another model: layers\.1\.linear\.weight has shape \(6, 3\) here and \(5, 3\) there",
        ),
        ("deeper", r"is of another model: layers\.2\.weight is not in it"),
        (
            "shallower",
            r"is of another model: layers\.1\.linear\.bias is in it, not in the model; .* and 1 more",
        ),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path: Path, change: str, message: str) -> None:
    run_and_save(tmp_path, 2)
    run = Run(Layout(), 0)
    layers = run.state.model_parts[0].layers
    match change:
        case "wider":
            layers["1"].linear = torch.nn.Linear(3, 6)
        case "deeper":
            layers["2"] = torch.nn.Linear(1, 1, bias=False)
        case "shallower":
            del layers["1"]
    with pytest.raises(ConfigurationError, match=message):
        manager(tmp_path).load(run.state)


def test_a_parameter_that_was_never_updated_has_no_optimizer_state_after_loading(tmp_path: Path) -> None:
    def run_with_idle_parameter() -> Run:
        run = Run(Layout(), 0)
        idle = torch.nn.Parameter(torch.ones(2))
        run.state.model_parts[0].register_parameter("idle", idle)
        run.state.optimizer.add_param_group({"params": [idle]})
        return run

    saved, loaded = run_with_idle_parameter(), run_with_idle_parameter()
    for name, parameter in saved.state.model_parts[0].named_parameters():
        parameter.grad = None if name == "idle" else torch.ones_like(parameter)
    saved.state.optimizer.step()
    manager(tmp_path).save(1, saved.state)
    manager(tmp_path).load(loaded.state)
    assert loaded.state.model_parts[0].idle not in loaded.state.optimizer.state
    assert_same(loaded, saved)


def test_several_stages_on_one_rank_are_saved_as_one_model(tmp_path: Path) -> None:
    saved, loaded = Run(Layout(), 0), Run(Layout(), 0)
    first, second = Stage(MODULES[:2]), Stage(MODULES[2:])
    optimizer = torch.optim.AdamW([*second.parameters(), *first.parameters()])
    saved.state = dataclasses.replace(saved.state, model_parts=[first, second], optimizer=optimizer)
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.add_(1.0)
    manager(tmp_path).save(1, saved.state)
    manager(tmp_path).load(loaded.state)
    np.testing.assert_equal(loaded.snapshot()["model"], saved.snapshot()["model"])


def test_parts_that_would_overwrite_each_other_are_not_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(Layout(), 0)
    state = dataclasses.replace(run.state, model_parts=[Stage(MODULES[:2]), Stage(MODULES[1:])])
    assert manager(tmp_path).save(1, state) is None
    assert "two model parts have a tensor named layers.0.linear.weight" in caplog.text


# Weights only


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_last_save_can_hold_only_weights_in_another_type(tmp_path: Path, dtype: str) -> None:
    run = run_and_save(tmp_path, 3, model_weights_only=True, export_dtype=dtype)
    assert names(tmp_path) == {"step-2", "step-3"}
    reader = CheckpointReader(tmp_path / "step-3")
    assert reader.names("optimizer") == reader.names("train") == reader.names("rng") == set()
    read = Run(Layout(), 0).state.model_parts[0].state_dict()
    reader.read_into("model", read)
    for name, tensor in run.state.model_parts[0].state_dict().items():
        assert torch.equal(read[name], tensor.to(getattr(torch, dtype)).float())


def test_a_run_goes_on_from_the_last_full_checkpoint_not_from_exported_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_and_save(tmp_path, 3, model_weights_only=True)
    assert load(tmp_path)[1] == 2
    assert "step-3 holds only weights" in caplog.text
    with pytest.raises(ConfigurationError, match="holds only weights"):
        load(tmp_path, load_step=3)


def test_a_seed_checkpoint_gives_the_initial_parameters_and_nothing_else(tmp_path: Path) -> None:
    seed = Run(Layout(), 0)
    with torch.no_grad():
        for parameter in seed.state.model_parts[0].parameters():
            parameter.mul_(1.5)
    manager(tmp_path, export_dtype="bfloat16").save_seed(seed.state)
    run, step = load(tmp_path)
    assert step == 0
    np.testing.assert_equal(run.snapshot()["model"], seed.snapshot()["model"])
    assert run.snapshot()["optimizer"] == {}


# Reading what somebody else may have written


class Malicious:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def test_metadata_that_would_run_code_is_refused(tmp_path: Path) -> None:
    run_and_save(tmp_path, 2)
    marker = tmp_path / "executed"
    (tmp_path / "step-2" / METADATA_NAME).write_bytes(pickle.dumps(Malicious(marker)))
    with pytest.raises(InvalidCheckpoint, match=r"(posix|nt)\.mkdir does not belong into a checkpoint"):
        CheckpointReader(tmp_path / "step-2")
    assert not marker.exists()


def test_metadata_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    run_and_save(tmp_path, 2)
    path = tmp_path / "step-2" / METADATA_NAME
    path.write_bytes(path.read_bytes().replace(b"__0_0.distcp", b"../../secret"))
    with pytest.raises(InvalidCheckpoint, match="leads out of the checkpoint"):
        CheckpointReader(tmp_path / "step-2")


def test_a_checkpoint_holds_tensors_only_and_its_training_state_is_json(tmp_path: Path) -> None:
    run_and_save(tmp_path, 2)
    reader = CheckpointReader(tmp_path / "step-2")
    text = from_bytes(reader.read_bytes("train", "state"))
    assert (
        text
        == '{"counters": {"tokens": 128}, "data": {"document": 6, "epoch": 0}, "schedule": {"steps_made": 2}, "step": 2}'
    )
