"""`stageline plan`: prints, compares, searches, and refuses in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from parallelisms.pipeline.setting import Costs
from parallelisms.pipeline.timeline_file import timeline_text
from tests.pipeline.synthetic import measured, schedule_of
from trainer.commands.main import main
from trainer.commands.plan import run
from trainer.errors import ConfigurationError


def output(capsys: pytest.CaptureFixture[str], arguments: str) -> str:
    assert run(arguments.split()) == 0
    return capsys.readouterr().out


def test_a_plan_shows_mesh_stages_memory_network_and_picture(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(
        capsys,
        "--config debug.toml --world-size 8 --experimental.pipeline_parallel_degree 4 --accelerator A100 "
        "--training.mixed_precision_param bfloat16",
    )
    for part in (
        "mesh      8 ranks: pipeline 4 x shard 2",
        "in nodes of 8",
        "layers.0 .. layers.1",
        "of one rank at its peak",
        "that one rank sends in a step",
        "1F1B  4 ranks, 4 stages",
        "rank 3 ",
        "of A100-80: fits",
        "tokens per second",
    ):
        assert part in text


def test_json_holds_everything(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(
        capsys,
        "--config debug.toml --world-size 8 --experimental.pipeline_parallel_degree 4 --accelerator H100 --json "
        "--training.mixed_precision_param bfloat16",
    )
    plan = json.loads(text)
    assert plan["mesh"] == {"pipeline": 4, "replicate": 1, "shard": 2, "context": 1, "tensor": 1}
    assert plan["nodes"]["dimensions"]["pipeline"]["stride"] == 2
    assert len(plan["memory"]) == len(plan["network"]) == 4
    assert plan["accelerator"]["fits"] is True
    assert plan["accelerator"]["estimate"]["mfu"] < plan["compute"]["mfu_ceiling"]
    assert plan["warnings"]
    assert [actions.split()[0] for actions in plan["schedule"]["actions"]]


def test_the_nodes_can_have_another_size(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "--config debug.toml --world-size 8 --gpus-per-node 4")
    assert "neighbours, 4 in a node" in text


def test_actions_are_printed_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--config debug.toml --world-size 2 --experimental.pipeline_parallel_degree 2"
    assert "0SEND_F0" not in output(capsys, arguments)
    assert "0F0 0SEND_F0" in output(capsys, f"{arguments} --actions")


def test_notices_of_the_configuration_are_among_the_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "--config debug.toml --world-size 1 --training.warmup_steps 500 --json")
    assert any("warm" in warning for warning in json.loads(text)["warnings"])


def test_the_schedule_can_be_written_for_torch_and_read_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "schedule.csv"
    degree = "--config debug.toml --world-size 2 --experimental.pipeline_parallel_degree 2"
    output(capsys, f"{degree} --write-csv {path}")
    again = output(capsys, f"{degree} --experimental.pipeline_parallel_schedule_csv {path} --json")
    assert json.loads(again)["schedule"]["name"] == "CSV"


def test_stages_are_timed_with_what_a_run_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    schedule = schedule_of("1F1B", ranks=4, microbatches=8)
    slow = Costs((1.0, 5.0, 1.0, 1.0), (1.0,) * 4, (1.0,) * 4)
    path = tmp_path / "step-3.json"
    path.write_text(timeline_text(measured(schedule, slow)))
    text = output(
        capsys,
        f"--config debug.toml --world-size 4 --experimental.pipeline_parallel_degree 4 --costs {path} --json",
    )
    planned = json.loads(text)["schedule"]
    assert planned["unit"] == "seconds"
    assert (
        planned["prediction"]["step"] > 4 * 7.0
    )  # the second stage takes seven for each of four microbatches, all others three


def test_two_configurations_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "--compare llama_8b.toml llama_70b.toml --world-size 64 --accelerator H100")
    assert text.startswith("What differs:")
    assert "model.flavor" in text
    assert "peak of a rank" in text
    data = json.loads(output(capsys, "--compare llama_8b.toml llama_8b.toml --world-size 8 --json"))
    assert data["differences"] == []


@pytest.mark.slow
def test_a_search_proposes_layouts_with_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "--search --config llama_8b.toml --world-size 16 --accelerator H100 --top 2")
    assert "\n1. " in text
    assert "\n2. " in text
    assert "\n3. " not in text
    assert "--experimental.pipeline_parallel_degree" in text
    data = output(capsys, "--search --config llama_8b.toml --world-size 16 --accelerator H100 --json")
    assert json.loads(data)["world_size"] == 16


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--config debug.toml --accelerator H10", "did you mean H100-SXM?"),
        ("--search --config debug.toml", "--search needs --accelerator"),
        ("--compare a.toml", "expected 2 arguments"),
        ("--compare debug.toml debug.toml --config debug.toml", "would be a third"),
        ("--world-size 0", "at least 1, got '0'"),
        ("--world-size many", "at least 1, got 'many'"),
        ("--config debug.toml --costs /nowhere/step-1.json", "cannot be read"),
        ("--config debug.toml --write-csv /nowhere/schedule.csv", "cannot be written"),
        ("--config debug.toml --world-size 3 --experimental.pipeline_parallel_degree 2", "3"),
        ("--config debug.toml --training.batchsize 2", "did you mean training.batch_size?"),
    ],
)
def test_what_is_wrong_is_told_in_a_line_with_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: str, reason: str
) -> None:
    with pytest.raises(ConfigurationError, match=None) as error:
        run(arguments.split())
    assert reason in str(error.value)
    assert len(str(error.value).splitlines()) == 1
    assert main(["plan", *arguments.split()]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_the_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["--help"])
    text = capsys.readouterr().out
    assert "stageline plan --search --config llama_8b.toml" in text
    assert "--gpus-per-node" in text


def test_a_command_line_plans_without_torch_in_a_process_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "trainer.commands.main", "plan", "--config", "debug.toml"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "trainer.plan.plan" in imported
    assert not imported & {"torch", "numpy", "datasets"}
