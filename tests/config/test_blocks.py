"""Rules and spellings of what is done to every layer: checkpointing, compilation."""

from __future__ import annotations

import pytest

from tests.config.reports import report_of
from trainer.config.load import load

COMPILE = "--training.compile"


@pytest.mark.parametrize("option", ["op", "1", "3"])
def test_checkpointing_is_selected_by_layer_or_by_operation(option: str) -> None:
    arguments = ["--activation_checkpoint.selective_ac_option", option]
    assert load(arguments).config.activation_checkpoint.selective_ac_option == option


def test_other_selections_are_refused_with_what_there_is() -> None:
    report = report_of("--activation_checkpoint.selective_ac_option", "ops")
    assert 'allowed: a number ≥ 1 as a string, such as "2", or "op"' in report


def test_torchtitans_spelling_of_compilation_is_understood() -> None:
    loaded = load(["--compile.enable", "true", "--compile.backend", "aot_eager"])
    assert loaded.config.training.compile
    assert loaded.config.training.compile_backend == "aot_eager"
    assert len(loaded.notices) == 2


def test_a_missing_compiler_is_said_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("CXX", "no-such-compiler")
    report = report_of(COMPILE, world_size=1)
    assert "needs a C++ compiler" in report
    assert "no-such-compiler" in report
    assert report_of(COMPILE, "--training.compile_backend", "aot_eager", world_size=1) == ""
    assert report_of(world_size=1) == ""


@pytest.mark.parametrize(("schedule", "noticed"), [("ZBVZeroBubble", 1), ("Interleaved1F1B", 0)])
def test_that_compiled_layers_leave_no_weight_part_is_a_notice(schedule: str, noticed: int) -> None:
    pipeline = ["--experimental.pipeline_parallel_degree", "2"]
    arguments = [COMPILE, *pipeline, "--experimental.pipeline_parallel_schedule", schedule]
    assert len(load(arguments).notices) == noticed
    assert load(arguments[1:]).notices == ()


def test_float8_needs_a_device_that_has_it_or_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    float8 = "--float8.enable_float8_linear"
    report = report_of(float8, world_size=1)
    assert "processors have no matrix products in float8; allowed: false, or float8.emulate = true" in report
    assert "\n" not in report
    assert report_of(float8, "--float8.emulate", world_size=1) == ""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'stageline[float8]'" in report_of(float8, "--float8.emulate", world_size=1)
