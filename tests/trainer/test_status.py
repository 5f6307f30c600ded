"""Where runs stand: told from their folders, whatever is missing or torn there."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.config.reports import run_python
from trainer.commands import status as command
from trainer.errors import ConfigurationError
from trainer.run_state import Phase, RunState, read_state, write_state
from trainer.status import Standing, read_errors, read_status

CONFIG = "[training]\nsteps = 100\n[comm]\ntrain_timeout_seconds = 50\ninit_timeout_seconds = 60\n"


def write_run(folder: Path, *, steps: int = 40, state: RunState | None = None) -> Path:
    (folder / "logs").mkdir(parents=True)
    (folder / "config.toml").write_text(CONFIG)
    rows = [
        {"step": step, "loss": 5 - step / 100, "tokens_per_second": 1000.0, "step_seconds": 2.0}
        for step in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
        + '{"step": 40, "validation_loss": 4.5}\n{"step": 41, "lo'
    )
    write_state(folder, RunState.begin() if state is None else state)
    return folder


def test_a_process_that_lives_is_running_with_the_time_that_is_left(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    for step in (20, 30):
        (folder / "checkpoint" / f"step-{step}").mkdir(parents=True)
    (folder / "checkpoint" / "step-20" / "manifest.json").write_text("{}")
    status = read_status(folder)
    assert (status.standing, status.step, status.steps) == (Standing.RUNNING, 40, 100)
    assert (status.loss, status.validation_loss) == (4.6, 4.5)
    assert (status.tokens_per_second, status.seconds_left) == (1000.0, 120.0)
    assert status.checkpoint == 20  # 30 is being written


def test_a_process_that_is_gone_was_killed_also_if_its_number_is_another_ones(tmp_path: Path) -> None:
    gone = replace(RunState.begin(), process=2**22 + 1)
    assert read_status(write_run(tmp_path / "a", state=gone)).standing is Standing.KILLED
    reused = replace(RunState.begin(), born=1)
    assert read_status(write_run(tmp_path / "b", state=reused)).standing is Standing.KILLED


def test_on_another_machine_it_is_stale_when_nothing_was_written_for_long(tmp_path: Path) -> None:
    elsewhere = replace(RunState.begin(), host="somewhere-else")
    folder = write_run(tmp_path / "run", state=elsewhere)
    assert read_status(folder).standing is Standing.RUNNING
    # Of the longest wait, 50 s and three times 10 steps of 2 s.
    assert read_status(folder, now=time.time() + 109).standing is Standing.RUNNING
    assert read_status(folder, now=time.time() + 111).standing is Standing.STALE


@pytest.mark.parametrize(
    ("phase", "step", "standing"),
    [
        (Phase.FINISHED, 100, Standing.FINISHED),
        (Phase.FINISHED, 50, Standing.STOPPED),  # more steps are asked for now
        (Phase.STOPPED, 50, Standing.STOPPED),
    ],
)
def test_how_it_ended(tmp_path: Path, phase: Phase, step: int, standing: Standing) -> None:
    folder = write_run(tmp_path / "run", state=replace(RunState.begin(), phase=phase, step=step))
    status = read_status(folder)
    assert (status.standing, status.step, status.seconds_left) == (standing, step, None)


def test_a_failure_is_told_with_its_exit_code_and_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run")
    failure = {"rank": 3, "exit_code": 4, "reason": "raised OSError: [no]\nspace"}
    (folder / "failure.json").write_text(json.dumps(failure))
    assert command.run([str(folder)]) == 4
    assert "exit code 4: rank 3 raised OSError: [no] space" in capsys.readouterr().out


def test_errors_of_all_ranks_come_in_order_each_with_its_stack(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "logs" / "rank_0.log").write_text(
        "2026-01-02 03:04:07,500 rank 0 ERROR late\n2026-01-02 03:04:08,000 rank 0 INFO fine\nmore of that\n"
    )
    (folder / "logs" / "rank_1.log").write_text(
        "2026-01-02 03:04:06,000 rank 1 WARNING odd\n2026-01-02 03:04:06,100 rank 1 ERROR first\n  File x\nOSError: y\n"
    )
    errors = read_errors(folder)
    assert [(error.rank, error.text) for error in errors] == [(1, "first\n  File x\nOSError: y"), (0, "late")]
    assert command.run([str(folder), "--errors"]) == 0
    assert (
        "2 errors in the logs of its ranks\n2026-01-02 03:04:06,100 rank 1 first\n" in capsys.readouterr().out
    )


def test_a_folder_of_runs_stands_for_them_and_json_tells_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / "study" / name)
    (tmp_path / "study" / "notes").mkdir()
    assert command.run([str(tmp_path / "study"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(Path(each["folder"]).name, each["standing"], each["step"]) for each in told] == [
        ("a", "running", 40),
        ("b", "running", 40),
    ]
    with pytest.raises(ConfigurationError, match="is not the folder of a run"):
        command.run([str(tmp_path / "study" / "notes")])


def test_whatever_is_torn_or_missing_leaves_only_that_unknown(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    for name in ("config.toml", "metrics.jsonl", "state.json"):
        (folder / name).write_bytes(os.urandom(200))
    (folder / "failure.json").write_text("[]")
    status = read_status(folder)
    assert (status.standing, status.step, status.steps) == (Standing.UNKNOWN, None, None)
    assert read_state(folder) is None
    assert read_status(tmp_path / "nowhere").standing is Standing.UNKNOWN


def test_of_a_long_file_only_the_end_is_read_and_torch_is_not_needed(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("\n" + "x" * 2**20 + "\n" + json.dumps({"step": 77, "loss": 2.0}) + "\n")
    assert read_status(folder).step == 77
    code = (
        "import sys; from trainer.commands.status import run; run(sys.argv[1:]);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'pydantic')))"
    )
    assert run_python("-c", code, str(folder)).returncode == 0
