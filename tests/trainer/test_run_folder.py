"""What a run writes about itself into its folder."""

from __future__ import annotations

import json
import platform
from datetime import datetime
from pathlib import Path

import pytest
import torch

from trainer.config.load import load
from trainer.environment import describe_environment
from trainer.plan.plan import make_plan
from trainer.report.run import read_runs
from trainer.run_folder import RunFolder


def test_configuration_plan_and_environment_are_written_and_can_be_read_again(tmp_path: Path) -> None:
    loaded = load(["--training.batch_size", "16"])
    RunFolder(tmp_path / "run").describe(loaded, make_plan(loaded.config, 1))
    again = load(["--config", str(tmp_path / "run" / "config.toml")])
    assert again.config == loaded.config
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["batch"]["batch_size"] == 16
    (run,) = read_runs([tmp_path / "run"])
    assert run.environment["torch"].string() == torch.__version__
    assert run.problems == ("metrics.jsonl is missing",)


def test_the_environment_tells_versions_devices_and_hosts() -> None:
    told = describe_environment(1)
    assert told["python"] == platform.python_version()
    assert told["torch"] == torch.__version__
    assert told["device"] == ("CPU" if not torch.cuda.is_available() else torch.cuda.get_device_name())
    assert (told["ranks"], told["hosts"]) == (1, 1)
    assert told["threads"] == torch.get_num_threads()
    assert datetime.fromisoformat(told["started"]).tzinfo is not None
    json.dumps(told, allow_nan=False)


@pytest.mark.parametrize(
    ("local", "ranks", "hosts"), [("8", 64, 8), ("4", 4, 1), ("8", 12, 2), (None, 64, None), ("x", 2, None)]
)
def test_hosts_are_counted_by_their_ranks_or_not_known(
    monkeypatch: pytest.MonkeyPatch, local: str | None, ranks: int, hosts: int | None
) -> None:
    if local is None:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    assert describe_environment(ranks)["hosts"] == hosts
