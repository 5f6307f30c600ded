"""`stageline submit`: what is written and checked. That SLURM takes it is in tests/slurm."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from trainer.cluster.batch_script import TEMPLATE, batch_script, options_of, read_template
from trainer.commands.submit import run
from trainer.errors import ConfigurationError

TINY = ["--model.tokenizer_path", "byte", "--model.override.vocab_size", "258"]


@pytest.fixture(autouse=True)
def _no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.commands.submit._gpus_of_nodes", lambda partition: None)


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The batch script that --dry-run shows."""
    assert run([*arguments, "--dry-run", *TINY]) == 0
    return "#!/bin/bash" + capsys.readouterr().out.partition("#!/bin/bash")[2]


def test_the_template_is_a_batch_script_that_works_by_itself() -> None:
    text = read_template(TEMPLATE)
    subprocess.run(["bash", "-n", TEMPLATE], check=True)
    assert options_of(text)["signal"] == "USR1@300"
    assert "requeue" in options_of(text)


def test_options_replace_those_of_the_template_and_come_before_all_else() -> None:
    text = '#!/bin/bash\n#SBATCH --time=1:00\n#SBATCH --qos high\n./run_train.sh "$@"\n'
    assert batch_script(text, {"time": "2:00", "exclusive": ""}, "train it") == (
        "#!/bin/bash\n#SBATCH --time=2:00\n#SBATCH --exclusive\n#SBATCH --qos high\ntrain it\n"
    )


def test_the_script_has_what_was_asked_for_and_is_right_for_the_shell(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = shown(
        capsys,
        *("--nodes", "2", "--gpus-per-node", "4", "--time", "2:00:00", "--partition", "fast"),
        *("--sbatch=--qos=high", "--job.description", "it's a $HOME run"),
    )
    for line in (
        "nodes=2",
        "gpus-per-node=4",
        "ntasks-per-node=4",
        "time=2:00:00",
        "partition=fast",
        "qos=high",
    ):
        assert script.count(f"#SBATCH --{line}\n") == 1
    assert script.count("#SBATCH --time") == 1
    file = tmp_path / "job"
    file.write_text(script.replace("/run_train.sh", "/no-such-program"))
    subprocess.run(["bash", "-n", file], check=True)
    assert "'it'\"'\"'s a $HOME run'" in script


def test_a_sites_template_is_taken_and_its_processes_count(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    site = tmp_path / "site.sbatch"
    site.write_text('#!/bin/bash\n#SBATCH --gpus-per-node=h100:2\nmodule load cuda\n./run_train.sh "$@"\n')
    script = shown(capsys, "--template", str(site), "--nodes", "2")
    assert "module load cuda" in script
    assert "#SBATCH --ntasks-per-node=2" in script


def test_a_study_becomes_an_array(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    study = tmp_path / "study.toml"
    study.write_text("[sweep.grid]\noptimizer.lr = [1e-3, 3e-4, 1e-4]\n")
    script = shown(capsys, "--array", "--config", str(study))
    assert "#SBATCH --array=0-2\n" in script
    assert f"sweep --config {study} --model.tokenizer_path byte" in script
    assert '--index "$SLURM_ARRAY_TASK_ID"\n' in script
    assert "#SBATCH --array=0-1%1\n" in shown(capsys, "--array", "0-1%1", "--config", str(study))
    with pytest.raises(ConfigurationError, match="has the runs 0 to 2"):
        run(["--array", "0-3", "--config", str(study)])


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ("--nodes 3 --processes-per-node 1 --experimental.pipeline_parallel_degree 2", "3"),
        ("--nodes 0", "--nodes"),
        ("--time soon", "is no time as SLURM writes it"),
        ("--template /no/such/file", "No such file"),
        ("--training.dataset text --training.dataset_path /no/such/file", "/no/such/file"),
        ("--array", "is no study"),
    ],
)
def test_what_is_wrong_is_refused_before_slurm_hears_of_it(
    arguments: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.commands.submit._submit", lambda path: pytest.fail("submitted"))
    with pytest.raises(ConfigurationError, match=what):
        run(arguments.split())


def test_a_template_without_the_training_is_none(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_text("#!/bin/bash\nsrun train\n")
    with pytest.raises(ConfigurationError, match=r"with one line \./run_train\.sh"):
        read_template(file)


@pytest.mark.parametrize(
    ("said", "gpus"), [("(null)\n", None), ("gpu:8\ngpu:h100:4(S:0-1),shard:9\n", 4), ("gpu:a100:8", 8)]
)
def test_gpus_of_nodes_are_read_as_sinfo_writes_them(
    said: str, gpus: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    from trainer.commands.submit import _gpus_of_nodes

    sinfo = tmp_path / "sinfo"
    sinfo.write_text(f"#!/bin/sh\ncat <<END\n{said}\nEND\n")
    sinfo.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert _gpus_of_nodes("fast") == gpus
