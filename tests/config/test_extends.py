"""`extends`: one file builds on another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.config.reports import report_of
from trainer.config.load import config_to_toml, load

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


def test_tables_are_merged_key_by_key_along_a_chain(write: Write) -> None:
    write("base.toml", "[training]\nsteps = 7\nseq_len = 64\n[model.override]\ndim = 128\nn_layers = 4\n")
    write("sub/middle.toml", 'extends = "../base.toml"\n[training]\nseq_len = 32\nbatch_size = 4\n')
    path = write("top.toml", 'extends = "sub/middle.toml"\n[model.override]\nn_layers = 2\n')
    loaded = load(["--config", str(path), "--training.batch_size", "2"])
    training = loaded.config.training
    assert (training.steps, training.seq_len, training.batch_size) == (7, 32, 2)
    assert loaded.config.model.override == {"dim": 128, "n_layers": 2}
    assert loaded.name == "top"


def test_the_merged_whole_is_a_configuration_of_its_own(write: Write, tmp_path: Path) -> None:
    write("base.toml", "[training]\nsteps = 7\n")
    path = write("top.toml", 'extends = "base.toml"\n[training]\nseq_len = 32\n')
    config = load(["--config", str(path)]).config
    whole = write("whole.toml", config_to_toml(config))
    assert load(["--config", str(whole)]).config == config


def test_of_several_bases_later_ones_go_before(write: Write) -> None:
    write("a.toml", "[training]\nsteps = 1\nseq_len = 64\n")
    write("b.toml", "[training]\nsteps = 2\n")
    path = write("top.toml", 'extends = ["a.toml", "b.toml"]\n')
    training = load(["--config", str(path)]).config.training
    assert (training.steps, training.seq_len) == (2, 64)


def test_a_base_that_is_not_beside_the_file_is_a_shipped_one(write: Write) -> None:
    path = write("top.toml", 'extends = "llama_8b.toml"\n')
    assert load(["--config", str(path)]).config.model.flavor == "8B"


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ('["lr_scheduler"]', ("lr_scheduler",)),
        ('["...", "lr_scheduler"]', ("optimizer", "dataloader", "lr_scheduler")),
        ('["lr_scheduler", "..."]', ("lr_scheduler", "optimizer", "dataloader")),
        ("[]", ()),
    ],
)
def test_a_list_is_replaced_or_goes_on_where_the_dots_are(
    write: Write, entries: str, expected: object
) -> None:
    write("base.toml", '[checkpoint]\nexclude_from_loading = ["optimizer", "dataloader"]\n')
    path = write("top.toml", f'extends = "base.toml"\n[checkpoint]\nexclude_from_loading = {entries}\n')
    loaded = load(["--config", str(path)])
    assert loaded.config.checkpoint.exclude_from_loading == expected
    assert loaded.notices == ()


def test_values_in_old_and_new_spellings_replace_each_other(write: Write) -> None:
    write(
        "base.toml",
        "[training]\nlocal_batch_size = 8\n[optimizer]\nbeta1 = 0.5\nbeta2 = 0.6\n"
        "[parallelism]\npipeline_parallel_microbatch_size = 1\n[checkpoint]\nload_only = true\n",
    )
    path = write(
        "top.toml",
        'extends = "base.toml"\n[training]\nbatch_size = 4\n[optimizer]\nbetas = [0.7, 0.8]\n'
        "[experimental]\npipeline_parallel_microbatches = 2\n[checkpoint]\nload_only = false\n",
    )
    config = load(["--config", str(path)]).config
    assert config.training.batch_size == 4
    assert config.optimizer.betas == (0.7, 0.8)
    assert config.experimental.pipeline_parallel_microbatches == 2


def test_none_unsets_what_a_base_sets(write: Write) -> None:
    write("base.toml", "[training]\nglobal_batch_size = 64\n")
    path = write("top.toml", 'extends = "base.toml"\n[training]\nglobal_batch_size = "none"\n')
    assert load(["--config", str(path)]).config.training.global_batch_size is None


def test_a_problem_names_the_file_and_line_that_the_value_is_from(write: Write) -> None:
    base = write("base.toml", "[training]\n\nsteps = 0\n")
    path = write("top.toml", 'extends = "base.toml"\n[training]\nlocal_batch_size = 8\nseqlen = 3\n')
    lines = report_of("--config", str(path)).splitlines()
    assert any(line.startswith(f"{base}:3: training.steps = 0: is too small") for line in lines)
    assert any(line.startswith(f"{path}:4: training.seqlen = 3: unknown key") for line in lines)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('extends = "top.toml"\n', "top.toml:1: extends = 'top.toml': builds on itself"),
        ('extends = "nowhere/x.toml"\n', "extends = 'nowhere/x.toml': there is no such file"),
        ('extends = "llama_9b.toml"\n', "did you mean llama_8b.toml?"),
        ("extends = 3\n", "top.toml:1: extends: names no file; allowed: a file, or a list of files"),
        ("extends = []\n", "names no file"),
        ('extends = "broken.toml"\n', "broken.toml:2: no valid TOML"),
        ('extends = "circle.toml"\n', "builds on itself"),
    ],
)
def test_what_cannot_be_built_upon_is_refused_with_its_place(write: Write, text: str, reason: str) -> None:
    write("broken.toml", "[training]\nsteps = \n")
    write("circle.toml", 'extends = "top.toml"\n')
    report = report_of("--config", str(write("top.toml", text)))
    assert reason in report
    assert "\n" not in report
