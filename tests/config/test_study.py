"""Studies: which runs a table [sweep] stands for, how they are called, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.config.load import load
from trainer.config.study import Study, is_study, read_study
from trainer.errors import ConfigurationError


def study_of(folder: Path, text: str, *arguments: str) -> Study:
    path = folder / "study.toml"
    path.write_text(f'extends = "debug.toml"\n{text}', encoding="utf-8")
    return read_study(["--config", str(path), *arguments])


def test_a_grid_is_every_combination_each_in_its_folder(tmp_path: Path) -> None:
    study = study_of(
        tmp_path,
        "[sweep.grid]\noptimizer.lr = [1e-3, 3e-5]\nmodel.override.dim = [64, 128]\n",
        "--training.steps",
        "7",
    )
    assert [run.name for run in study.runs] == [
        "lr=0.001,dim=64",
        "lr=0.001,dim=128",
        "lr=3e-05,dim=64",
        "lr=3e-05,dim=128",
    ]
    last = study.runs[-1]
    assert (last.loaded.config.optimizer.lr, last.loaded.config.model.override["dim"]) == (3e-5, 128)
    assert last.folder == Path("outputs/study/lr=3e-05,dim=128")
    assert {run.loaded.config.training.steps for run in study.runs} == {7}


def test_a_list_names_what_goes_together_and_is_combined_with_a_grid(tmp_path: Path) -> None:
    study = study_of(
        tmp_path,
        '[[sweep.list]]\nname = "wide"\nmodel.override = {dim = 128, n_layers = 2}\n'
        "[[sweep.list]]\nmodel.override.dim = 64\n"
        '[sweep.grid]\n"training.seed" = [0, 1]\n',
    )
    assert [run.name for run in study.runs] == [
        "wide,seed=0",
        "wide,seed=1",
        "dim=64,seed=0",
        "dim=64,seed=1",
    ]
    assert study.runs[0].values == {
        "model.override.dim": 128,
        "model.override.n_layers": 2,
        "training.seed": 0,
    }


def test_draws_stay_the_same_and_do_not_depend_on_how_many_there_are(tmp_path: Path) -> None:
    table = (
        "[sweep.random]\nruns = {}\nseed = 5\noptimizer.lr = {{low = 1e-5, high = 1e-1, log = true}}\n"
        "training.warmup_steps = {{low = 1, high = 9}}\noptimizer.weight_decay = [0.0, 0.1]\n"
    )
    few, many = (study_of(tmp_path, table.format(runs)) for runs in (3, 12))
    assert [run.name for run in few.runs] == [run.name for run in many.runs[:3]]
    rates = [run.loaded.config.optimizer.lr for run in many.runs]
    assert min(rates) < 1e-3 < max(rates)
    assert all(1 <= run.loaded.config.training.warmup_steps <= 9 for run in many.runs)
    # What a name says is exactly what is trained with.
    assert all(f"lr={run.loaded.config.optimizer.lr:g}" in run.name for run in many.runs)


def test_a_folder_on_the_command_line_is_that_of_the_study(tmp_path: Path) -> None:
    study = study_of(
        tmp_path, "[sweep.grid]\ntraining.seed = [3]\n", "--job.dump_folder", str(tmp_path / "out")
    )
    assert study.runs[0].folder == tmp_path / "out" / "seed=3"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[sweep.gird]\ntraining.seed = [1]\n", "is no kind of sweep; allowed: grid, list or random; did you mean sweep.grid?"),
        ("[sweep]\n", "is no kind of sweep"),
        ("[sweep.grid]\ntraining.seed = 1\n", "study.toml:2: training.seed = 1: is no list of the values to try"),
        ("[sweep.grid]\ntraining.sed = [1]\n", "training.sed = 1: unknown key; did you mean training.seed?"),
        ("[sweep.grid]\ntraining.steps = [1, 0]\n", "steps=0: "),
        ("[sweep.grid]\ntraining.seed = [1, 1]\n", "two runs are the same, or are called so: seed=1"),
        ("[sweep.random]\nruns = 0\ntraining.seed = [1]\n", "integer ≥ 1: how many runs"),
        ("[sweep.random]\nruns = 2\noptimizer.lr = {low = 0, high = 1, log = true}\n", "has no logarithm at its low end"),
        ("[sweep.random]\nruns = 2\noptimizer.lr = {low = 2, high = 1}\n", "is an empty range"),
        ('[[sweep.list]]\nname = "a/b"\ntraining.seed = 1\n', "is no name of a folder"),
        ("[sweep]\nlist = [1]\n", "is no list of runs"),
        ("[sweep.grid]\ntraining.seed = [1]\n[[sweep.list]]\ntraining.seed = 2\n", "training.seed is varied by two kinds of sweep"),
    ],
)  # fmt: skip
def test_what_makes_no_study_is_refused_with_its_place(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        study_of(tmp_path, text)
    assert reason in str(refused.value)


def test_a_key_that_is_varied_cannot_be_set_for_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is varied by the study"):
        study_of(tmp_path, "[sweep.grid]\ntraining.seed = [1, 2]\n", "--training.seed", "3")


def test_a_study_is_no_single_run(tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    path.write_text("[sweep.grid]\ntraining.seed = [1]\n", encoding="utf-8")
    assert is_study(["--config", str(path)])
    assert not is_study([])
    with pytest.raises(ConfigurationError, match=r"is a study of several runs: stageline sweep"):
        load(["--config", str(path)])
    with pytest.raises(ConfigurationError, match="is no study"):
        read_study([])
