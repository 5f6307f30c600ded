"""The reference and the shipped files: up to date, complete, right."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path

import pytest

from tests.config.reports import ROOT, report_of, rules_broken
from trainer import __version__
from trainer.config import processes, reference
from trainer.config.describe import allowed, default, fields
from trainer.config.load import CONFIGS, load
from trainer.config.machine import visible_gpus
from trainer.config.rules import check_files
from trainer.config.schema import Config

WORLD_SIZES = {
    "debug": 1,
    "llama_1b": 8,
    "llama_8b": 8,
    "llama_70b": 64,
    "llama_405b": 512,
    "llama2_7b": 8,
    "llama2_13b": 16,
    "llama2_70b": 64,
    "llama3.1_8b": 64,
    "llama3.1_70b": 256,
    "llama3.1_405b": 16384,
    "llama3.2_1b": 8,
    "llama3.2_3b": 8,
    "llama3.3_70b": 64,
    "qwen3_0.6b": 8,
    "qwen3_8b": 8,
    "qwen3_32b": 64,
    "qwen3_30b_a3b": 32,
    "qwen3_235b_a22b": 256,
    "moonlight_16b": 16,
    "deepseek_v3_671b": 2048,
}


def test_the_reference_is_what_the_classes_generate() -> None:
    written = reference.PATH.read_text(encoding="utf-8")
    assert written == reference.render(), "run: python -m trainer.config.reference"


def test_every_key_says_what_it_means_what_it_allows_and_its_default() -> None:
    for key, field in fields():
        assert field.description, key
        assert allowed(field), key
        assert default(field), key


def test_the_version_is_the_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == __version__


def test_every_shipped_file_is_listed_here() -> None:
    assert {path.stem for path in CONFIGS.glob("*.toml")} == set(WORLD_SIZES)


@pytest.mark.parametrize("name", WORLD_SIZES)
def test_a_shipped_file_is_right_at_its_world_size_with_no_notice(name: str) -> None:
    """Case O2: a shipped file that uses keys which are not there any more."""
    arguments = ("--config", f"{name}.toml")
    loaded = load(arguments)
    assert rules_broken(*arguments, world_size=WORLD_SIZES[name]) == []
    assert check_files(loaded.config) == []
    assert loaded.notices == ()
    assert loaded.config.job.description
    world_size = re.search(r"World size: (\d+)", loaded.path.read_text(encoding="utf-8"))
    assert world_size is None or int(world_size[1]) == WORLD_SIZES[name]


@pytest.mark.parametrize("name", WORLD_SIZES)
def test_a_plan_can_be_made_of_a_shipped_file(name: str) -> None:
    plan = importlib.import_module("trainer.plan.plan")
    made = plan.make_plan(load(["--config", f"{name}.toml"]).config, WORLD_SIZES[name])
    assert made.layout.world_size == WORLD_SIZES[name]


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        ((), 1),
        (("--experimental.expert_parallel_degree", "4", "--experimental.context_parallel_degree", "2"), 4),
        (("--experimental.pipeline_parallel_degree", "4"), 4),
        (("--training.data_parallel_shard_degree", "2", "--training.data_parallel_replicate_degree", "3"), 6),
    ],
)
def test_without_gpus_as_many_processes_are_needed_as_the_degrees_make(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], count: int
) -> None:
    monkeypatch.setattr(processes, "visible_gpus", lambda: 0)
    assert processes.processes_needed(load(arguments).config) == count
    monkeypatch.setattr(processes, "visible_gpus", lambda: 8)
    assert processes.processes_needed(load(arguments).config) == 8


def test_gpus_are_counted_as_cuda_would_show_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus(tmp_path) == 0
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus(tmp_path) == 3
    for value, count in (("", 0), ("-1", 0), ("1", 1), ("0,1", 2), ("0,-1,1", 1), ("0,1,2,3", 3)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert visible_gpus(tmp_path) == count


def test_the_schema_refuses_what_the_command_line_and_files_never_send() -> None:
    assert report_of() == ""
    with pytest.raises(ValueError, match="betas"):
        Config.model_validate({"optimizer": {"betas": "0.9"}})
