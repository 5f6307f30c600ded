"""Loading: the file, the command line over it, types, and the report of everything that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.config.reports import ROOT, config_of, report_of, run_python
from trainer.config.load import config_to_toml, load
from trainer.config.schema import Config
from trainer.config.toml_file import key_lines
from trainer.errors import ConfigurationError


def write(folder: Path, text: str, name: str = "my.toml") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_without_arguments_the_debug_configuration_is_loaded() -> None:
    loaded = load([])
    assert loaded.path == ROOT / "train_configs" / "debug.toml"
    assert loaded.name == "debug"
    assert loaded.dump_folder == Path("outputs/debug")
    assert loaded.config.training.mixed_precision_param == "float32"


def test_a_bare_name_is_looked_up_among_the_shipped_configurations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load(["--config", "llama_8b.toml"]).config.model.flavor == "8B"
    assert load(["--config=llama_8b.toml"]).config.model.flavor == "8B"


def test_the_command_line_goes_before_the_file_and_the_file_before_the_defaults(tmp_path: Path) -> None:
    file = write(tmp_path, "[training]\nsteps = 7\nseq_len = 64\n")
    config = load(["--config", file, "--training.steps", "9"]).config
    assert (config.training.steps, config.training.seq_len, config.training.batch_size) == (9, 64, 8)


def test_of_a_key_that_is_repeated_on_the_command_line_the_last_counts() -> None:
    assert config_of("--training.steps", "9", "--training.steps", "3").training.steps == 3


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (["--training.batch_size", "3"], "training.batch_size", 3),
        (["--training.batch_size=3"], "training.batch_size", 3),
        (["--optimizer.lr", "1"], "optimizer.lr", 1.0),
        (["--optimizer.lr", "1e-3"], "optimizer.lr", 1e-3),
        (["--checkpoint.load_step", "-1"], "checkpoint.load_step", -1),
        (["--metrics.enable_wandb"], "metrics.enable_wandb", True),
        (["--metrics.enable_wandb", "--training.steps", "3"], "metrics.enable_wandb", True),
        (["--metrics.enable_wandb", "true"], "metrics.enable_wandb", True),
        (["--metrics.enable_wandb", "True"], "metrics.enable_wandb", True),
        (["--metrics.rank_0_only=false"], "metrics.rank_0_only", False),
        (["--profiling.pipeline_timeline_steps", "[3]"], "profiling.pipeline_timeline_steps", (3,)),
        (["--optimizer.betas", "[0, 0.5]"], "optimizer.betas", (0.0, 0.5)),
        (
            ["--experimental.pipeline_parallel_split_points", "layers.2, layers.4"],
            "experimental.pipeline_parallel_split_points",
            ("layers.2", "layers.4"),
        ),
        (
            ["--experimental.pipeline_parallel_split_points", '["layers.2"]'],
            "experimental.pipeline_parallel_split_points",
            ("layers.2",),
        ),
        (["--job.description", "3 = x"], "job.description", "3 = x"),
        (["--job.dump_folder", "none"], "job.dump_folder", None),
        (["--experimental.pipeline_parallel_microbatches", "none"], "experimental.pipeline_parallel_microbatches", None),
        (["--model.override.n_layers", "4"], "model.override", {"n_layers": 4}),
        (["--model.override", "{n_layers = 4, dim = 128}"], "model.override", {"n_layers": 4, "dim": 128}),
    ],
)  # fmt: skip
def test_every_kind_of_value_can_be_set_on_the_command_line(
    arguments: list[str], key: str, value: object
) -> None:
    table, name = key.split(".")
    actual = getattr(getattr(config_of(*arguments), table), name)
    assert actual == value
    assert type(actual) is type(value)


def test_a_configuration_cannot_be_changed() -> None:
    config = config_of()
    with pytest.raises(ValueError, match="frozen"):
        config.training.steps = 3  # type: ignore[misc]


def test_overrides_in_the_file_and_on_the_command_line_come_together(tmp_path: Path) -> None:
    file = write(tmp_path, "[model.override]\nn_layers = 4\ndim = 128\n")
    override = load(["--config", file, "--model.override.dim", "64"]).config.model.override
    assert override == {"n_layers": 4, "dim": 64}


def test_all_problems_are_in_one_report_each_with_its_line_in_order(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        """\
[training]
batchsize = 8
steps = "3"

[trainin]
seq_len = 4

[experimental]
pipeline_parallel_degree = 9
""",
    )
    lines = report_of("--config", file, "--optimizer.lr", "-1").splitlines()
    assert lines == [
        f"{file}:2: training.batchsize = 8: unknown key; did you mean training.batch_size?",
        f'{file}:3: training.steps = "3": a string is no integer; allowed: integer ≥ 1; did you mean 3?',
        f"{file}:6: trainin.seq_len = 4: unknown table [trainin]; did you mean training.seq_len?",
        f"{file}:9: experimental.pipeline_parallel_degree = 9: more stages than the model's 8 layers; allowed: 1 to 8",
        "command line: --optimizer.lr -1: is too small; allowed: number > 0",
    ]


def test_what_may_follow_from_a_reported_problem_is_not_reported_too(tmp_path: Path) -> None:
    file = write(
        tmp_path, '[model]\nflavour = "8B"\n[experimental]\npipeline_parallel_degree = 16\n'
    )  # right for 8B, wrong for the default
    assert report_of("--config", file).count("\n") == 0
    assert "did you mean model.flavor" in report_of("--config", file)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"[training]\nsteps = = 3\n", ":2: no valid TOML: Invalid value"),
        (b"[training]\nsteps = 3\nsteps = 4\n", ":3: no valid TOML: Cannot overwrite a value"),
        (b'[job]\ndescription = "\xff"\n', ":2: is not UTF-8 text"),
        (b'[job]\ndescription = "open\n', ":2: no valid TOML"),
    ],
)
def test_a_file_that_is_no_toml_is_refused_with_the_line(
    tmp_path: Path, content: bytes, expected: str
) -> None:
    path = tmp_path / "my.toml"
    path.write_bytes(content)
    report = report_of("--config", str(path))
    assert report.startswith(f"{path}{expected}")
    assert "\n" not in report


def test_a_file_with_a_byte_order_mark_and_windows_line_ends_is_read(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_bytes(b"\xef\xbb\xbf[training]\r\nsteps = 3\r\nstep = 4\r\n")
    assert f"{path}:3: training.step = 4" in report_of("--config", str(path))


def test_a_missing_file_is_refused_with_the_names_there_are(tmp_path: Path) -> None:
    assert "did you mean llama_8b.toml?" in report_of("--config", "lama_8b.toml")
    write(tmp_path, "", "mine.toml")
    report = report_of("--config", str(tmp_path / "min.toml"))
    assert f"did you mean {tmp_path / 'mine.toml'}?" in report
    assert "is a folder" in report_of("--config", str(tmp_path))


def test_problems_of_a_missing_file_and_of_the_command_line_come_together() -> None:
    assert report_of("--config", "lama_8b.toml", "--training.stps", "3").count("\n") == 1


def test_lines_are_found_past_strings_arrays_and_comments_of_many_lines() -> None:
    text = '''\
# [no] = 3
top = 1
[a]  # a = 3
s = """
[not.a.table]
x = 1
"""
l = [
  "k = 1", # ]
  { y = "}" },
]
"q.r" . z = 'b = 1'
[[many]]
x = """a\\""" """"
y = {inline = [1,
  2]}
[ c . "d e" ]
t = 07:32:00
'''
    lines = key_lines(text)
    assert {".".join(key): line for key, line in lines.items()} == {
        "top": 2,
        "a": 3,
        "a.s": 4,
        "a.l": 8,
        "a.q.r.z": 12,
        "many": 13,
        "many.x": 14,
        "many.y": 15,
        "c.d e": 17,
        "c.d e.t": 18,
    }


def test_neither_torch_nor_data_libraries_are_imported_by_a_check() -> None:
    code = """
import sys
from trainer.config.load import config_to_toml, load
from trainer.config.processes import processes_needed
from trainer.config.rules import check_for_training
loaded = load([])
check_for_training(loaded, processes_needed(loaded.config))
config_to_toml(loaded.config)
print(sorted({"torch", "datasets", "numpy", "pandas", "rich", "pydantic_settings"} & set(sys.modules)))
"""
    result = run_python("-c", code)
    assert result.stdout.strip() == "[]", result.stderr


def test_help_names_every_key_with_its_meaning_and_an_example() -> None:
    result = run_python("-c", "from trainer.config.load import load; load(['--help'])")
    assert result.returncode == 0
    assert "--training.batch_size   integer ≥ 1 (default: 8)" in result.stdout
    assert "./run_train.sh --config llama_8b.toml" in result.stdout
    for table, field in Config.model_fields.items():
        assert field.annotation is not None
        for key in field.annotation.model_fields:
            assert f"--{table}.{key} " in result.stdout


TEXTS = st.text(min_size=1, max_size=20)
CONFIGURATIONS = st.fixed_dictionaries(
    {},
    optional={
        "job": st.fixed_dictionaries({}, optional={"description": st.text(), "dump_folder": TEXTS}),
        "model": st.fixed_dictionaries(
            {},
            optional={
                "tokenizer_path": TEXTS,
                "override": st.dictionaries(
                    st.sampled_from(["dim", "norm_eps", "tie_embeddings", "rope_scaling"]),
                    st.integers(1, 9) | st.booleans() | st.floats(0, 1) | st.just({"factor": 8.0}),
                ),
            },
        ),
        "optimizer": st.fixed_dictionaries(
            {},
            optional={
                "lr": st.floats(1e-300, 1e300),
                "betas": st.lists(st.floats(0, 1, exclude_max=True), min_size=2, max_size=2),
                "fused": st.booleans(),
            },
        ),
        "training": st.fixed_dictionaries(
            {}, optional={"seed": st.integers(0, 2**63 - 1), "global_batch_size": st.integers(1, 2**40)}
        ),
        "profiling": st.fixed_dictionaries(
            {}, optional={"pipeline_timeline_steps": st.lists(st.integers(1, 9))}
        ),
        "experimental": st.fixed_dictionaries(
            {}, optional={"pipeline_parallel_split_points": st.lists(TEXTS), "pipeline_parallel_memory_limit": st.integers(1, 9)}
        ),
    },
)  # fmt: skip


@settings(deadline=None, max_examples=40)
@given(CONFIGURATIONS)
def test_a_configuration_written_as_toml_loads_to_an_equal_one(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, dict[str, object]]
) -> None:
    config = Config.model_validate(values)
    path = tmp_path_factory.mktemp("written") / "config.toml"
    path.write_text(config_to_toml(config), encoding="utf-8")
    assert load(["--config", str(path)]).config == config


def test_everything_a_report_says_is_in_one_line_for_each_problem() -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(["--training.steps", "a\nb"])
    assert str(caught.value).count("\n") == 0
