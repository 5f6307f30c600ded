"""`stageline sweep`: what is run, in which order, and what is not run again. The runs themselves are stand-ins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.launched import launched
from trainer.commands import sweep
from trainer.config.load import load
from trainer.errors import ConfigurationError
from trainer.run_state import Phase, RunState, write_state
from trainer.status import Standing, read_status

STUDY = """\
extends = "debug.toml"
[job]
dump_folder = "{folder}"
[training]
steps = 3
batch_size = 2
seq_len = 32
mixed_precision_param = "float32"
[metrics]
log_freq = 1
[model.override]
dim = 32
n_layers = 2
n_heads = 2
n_kv_heads = 1
[sweep.grid]
training.seed = [1, 2, 3]
"""


@pytest.fixture
def study(tmp_path: Path) -> Path:
    path = tmp_path / "study.toml"
    path.write_text(STUDY.format(folder=tmp_path / "out"), encoding="utf-8")
    return path


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Exit codes of the runs by name, 0 for those that are not named; a run with 0 is finished afterwards."""
    codes: dict[str, int] = {}
    started: list[str] = []

    def run(command: Sequence[str]) -> int:
        config = load(["--config", command[-1]]).config
        folder = Path(str(config.job.dump_folder))
        started.append(folder.name)
        if not codes.get(folder.name):
            write_state(folder, RunState(Phase.FINISHED, config.training.steps, "h", 1, 1, 0, 0))
        codes["started"] = len(started)
        return codes.get(folder.name, 0)

    monkeypatch.setattr(sweep, "_run", run)
    return codes


def test_started_again_only_what_is_missing_runs(
    study: Path, ended: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    ended["seed=2"] = 4
    assert sweep.run([str(study)]) == 4
    assert ended.pop("started") == 3
    ended.pop("seed=2")
    assert sweep.run([str(study)]) == 0
    assert ended["started"] == 4
    assert "3 runs, 2 finished, 1 to do" in capsys.readouterr().out
    assert sweep.run([str(study), "--list"]) == 0
    assert capsys.readouterr().out.count(" finished ") == 3


def test_one_that_is_stopped_stops_the_study(study: Path, ended: dict[str, int]) -> None:
    ended["seed=1"] = 3
    assert sweep.run([str(study)]) == 3
    assert ended["started"] == 1


def test_an_index_runs_one(study: Path, ended: dict[str, int], tmp_path: Path) -> None:
    assert sweep.run([str(study), "--index", "2"]) == 0
    assert [each.name for each in (tmp_path / "out").iterdir()] == ["seed=3"]
    with pytest.raises(ConfigurationError, match="has the runs 0 to 2"):
        sweep.run([str(study), "--index", "3"])


def test_all_are_checked_before_the_first_starts(study: Path, ended: dict[str, int]) -> None:
    study.write_text(study.read_text("utf-8") + "model.override.n_heads = [2, 3]\n", encoding="utf-8")
    study.write_text(study.read_text("utf-8").replace("n_heads = 2\n", ""), encoding="utf-8")
    with pytest.raises(ConfigurationError) as refused:
        sweep.run([str(study)])
    assert str(refused.value).count("n_heads=3: ") == 3
    assert "started" not in ended


def test_a_dry_run_starts_nothing(
    study: Path, ended: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep.run([str(study), "--dry-run"]) == 0
    assert "started" not in ended
    assert not (tmp_path / "out").exists()
    assert capsys.readouterr().out.count("run_train.sh --config") == 3


@pytest.mark.slow
def test_the_launcher_trains_the_runs_of_a_study_and_their_status_says_so(
    study: Path, tmp_path: Path
) -> None:
    study.write_text(study.read_text("utf-8").replace("[1, 2, 3]", "[1, 2]"), encoding="utf-8")
    with launched(["--config", str(study)]) as job:
        code, out, err = job.end(timeout=240)
    assert code == 0, out + err
    for seed in (1, 2):
        status = read_status(tmp_path / "out" / f"seed={seed}")
        assert (status.standing, status.step, status.steps) == (Standing.FINISHED, 3, 3)
        assert status.loss is not None
        assert status.tokens_per_second is not None
    with launched(["--config", str(study)]) as job:
        assert "2 finished, 0 to do" in job.end()[1]
