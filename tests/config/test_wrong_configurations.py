"""Wrong configurations, as people write them: each is refused in one line that says why, before torch is imported."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.config.reports import report_of, run_python
from trainer.config import legacy
from trainer.config.describe import fields
from trainer.config.load import load
from trainer.config.rules import check
from trainer.errors import ConfigurationError

PP = "--experimental.pipeline_parallel_"
DP = "--training.data_parallel_"

# What is wrong, in a name; the arguments; the world size; a part of the reason.
WRONG: list[tuple[str, str, int, str]] = [
    ("key misspelled", "--training.batchsize 8", 1, "did you mean training.batch_size?"),
    ("key with hyphens", "--training.batch-size 8", 1, "did you mean training.batch_size?"),
    ("table misspelled", "--trianing.batch_size 8", 1, "did you mean training.batch_size?"),
    ("table left out", "--batch_size 8", 1, "did you mean training.batch_size?"),
    ("key of another table", "--model.seq_len 8", 1, "did you mean training.seq_len?"),
    ("key of no table", "--training.banana 8", 1, "unknown key"),
    ("table of no kind", "--banana.split 8", 1, "unknown table [banana]"),
    ("key without a value", "--training.steps", 1, "needs a value; allowed: integer ≥ 1"),
    ("value without a key", "8", 1, "belongs to no key"),
    ("file without --config", "llama_8b.toml", 1, "did you mean --config llama_8b.toml?"),
    ("configuration that is not there", "--config debgu.toml", 1, "did you mean debug.toml?"),
    ("configuration unnamed", "--config", 1, "needs a value"),
    ("word for an integer", "--training.steps many", 1, "a string is no integer"),
    ("integer in quotes", '--training.steps "3"', 1, "did you mean 3?"),
    ("float for an integer", "--training.seed 1.5", 1, "a float is no integer"),
    ("whole float for an integer", "--training.steps 3.0", 1, "a float is no integer"),
    ("exponent for an integer", "--training.steps 1e3", 1, "a float is no integer"),
    ("boolean for an integer", "--training.steps true", 1, "a boolean is no integer"),
    ("boolean for a number", "--optimizer.lr true", 1, "a boolean is no number"),
    ("integer for a boolean", "--training.deterministic 1", 1, "allowed: true or false"),
    ("yes for a boolean", "--metrics.enable_wandb yes", 1, "allowed: true or false"),
    ("list for an integer", "--training.steps [3]", 1, "a list is no integer"),
    ("table for an integer", "--training.steps {a=3}", 1, "a table is no integer"),
    ("value for a table", "--training 3", 1, "a table is expected"),
    ("entry of a wrong type", "--optimizer.betas [0.9,true]", 1, "an entry that is no number"),
    ("list too short", "--optimizer.betas [0.9]", 1, "too few entries"),
    ("list too long", "--optimizer.betas [0.9,0.9,0.9]", 1, "too many entries"),
    ("not a number", "--optimizer.lr nan", 1, "is not finite"),
    ("infinite", "--training.max_norm inf", 1, "is not finite"),
    ("negative length", "--training.seq_len -4", 1, "is too small; allowed: integer ≥ 1"),
    ("negative batch", "--training.batch_size -8", 1, "is too small"),
    ("no steps", "--training.steps 0", 1, "is too small"),
    ("learning rate of nothing", "--optimizer.lr 0", 1, "allowed: number > 0"),
    ("beta of one", "--optimizer.betas [0.9,1.0]", 1, "is too large"),
    ("ratio over one", "--lr_scheduler.decay_ratio 1.5", 1, "is too large; allowed: number ≥ 0 and ≤ 1"),
    ("negative seed", "--training.seed -1", 1, "allowed: integer ≥ 0"),
    ("shard degree of nothing", f"{DP}shard_degree 0", 1, "-1: all that remain"),
    ("choice in lower case", "--optimizer.name adamw", 1, 'did you mean "AdamW"?'),
    ("choice unknown", "--optimizer.name SGD", 1, "allowed: one of AdamW, Adam, Muon"),
    ("decay unknown", "--lr_scheduler.decay_type cosin", 1, 'did you mean "cosine"?'),
    ("precision unknown", "--training.mixed_precision_param float16", 1, "one of bfloat16, float32"),
    ("every how many layers", "--activation_checkpoint.selective_ac_option two", 1, "every how many layers"),
    ("empty name", "--checkpoint.folder=", 1, "is empty"),
    ("model unknown", "--model.name lama3", 1, "did you mean llama3?"),
    ("flavor unknown", "--model.flavor 9000B", 1, "allowed: one of debug"),
    ("size unknown", "--model.override.n_layer 3", 1, "did you mean model.override.n_layers?"),
    ("size of a wrong type", "--model.override.dim wide", 1, "wrong type for dim; allowed: integer"),
    ("heads that do not divide", "--model.override.n_heads 12", 1, "dim 256 is not divisible by n_heads 12"),
    ("key-value heads that do not divide", "--model.override.n_kv_heads 3", 1, "n_heads 8 is not divisible"),
    ("schedule unknown", f"{PP}schedule 1F2B {PP}degree 2", 2, "did you mean 1F1B?"),
    ("schedule file missing", f"{PP}schedule_csv /nonexistent.csv", 1, "there is no such file"),
    ("microbatches over batch", f"{PP}microbatches 64 {PP}degree 2", 2, "allowed: 1 to 8, or training.batch_size"),
    ("microbatches none", f"{PP}microbatches 0", 1, "is too small"),
    ("stages over layers", f"{PP}degree 512", 512, "more stages than the model's 8 layers"),
    ("interleaved stages over layers", f"{PP}degree 8 {PP}schedule Interleaved1F1B", 8, "8 ranks × 2 stages per rank"),
    ("split point unknown", f"{PP}split_points layers.99 {PP}degree 2", 2, "layers.99 is no layer of the model"),
    ("split point first", f"{PP}split_points layers.0 {PP}degree 2", 2, "in the first stage already"),
    ("split points out of order", f"{PP}split_points layers.4,layers.2 {PP}degree 3", 3, "out of order"),
    ("split points of one kind twice", f"{PP}split_points layers.4,layers.4 {PP}degree 3", 3, "given twice"),
    ("split points of no number", f"{PP}split_points [4] {PP}degree 2", 2, "an entry that is no string"),
    ("three split points, two ranks", f"{PP}split_points layers.2,layers.4,layers.6 {PP}degree 2", 2, "2 stages per rank"),
    ("two split points, two ranks", f"{PP}split_points layers.2,layers.4 {PP}degree 2", 2, "cannot share evenly"),
    ("stages decided twice", f"{PP}split_points layers.4 {PP}layers_per_stage 4 {PP}degree 2", 2, "one of the two"),
    ("one stage, V schedule", f"{PP}stages_per_rank 1 {PP}schedule ZBVZeroBubble {PP}degree 2", 2, "allowed: 2"),
    ("degree that does not divide", f"{PP}degree 3", 2, "allowed: 1 or 2;"),
    ("pipeline on one process", f"{PP}degree 4", 1, "does not divide 1 process"),
    ("product too small", f"{PP}degree 2 {DP}shard_degree 1", 4, "did you mean"),
    ("product too large", f"{DP}replicate_degree 2 {DP}shard_degree 2", 2, "the 2 processes there are"),
    ("global batch floored", "--training.global_batch_size 10 --training.batch_size 1", 4, "did you mean 8 or 12?"),
    ("data set misspelled", "--training.dataset python_doc", 1, 'did you mean "python_docs"?'),
    ("data set without its path", "--training.dataset jsonl", 1, "needs training.dataset_path"),
    ("path that is not there", "--training.dataset text --training.dataset_path /nonexistent", 1, "no such file or folder"),
    ("tokenizer that is not there", "--model.tokenizer_path /nonexistent/tokenizer.model", 1, "there is no such file"),
    ("checkpoint that is not there", "--checkpoint.load_step 999 --job.dump_folder /nonexistent", 1, "no checkpoint of this step"),
    ("load step without checkpoints", "--checkpoint.load_step 5 --checkpoint.enable_checkpoint false", 1, "has no effect"),
    ("early step in backward", "--optimizer.early_step_in_backward", 1, "known from torchtitan, not available in Stageline"),
    ("way to save that there is not", "--checkpoint.async_mode asink", 1, "async"),
    ("checkpoints where nobody can go", "--checkpoint.enable_checkpoint --checkpoint.folder nowhere://x", 1, "Protocol not known"),
    ("a large model here", "--config llama_405b.toml", 1, "needs an accelerator"),
]  # fmt: skip


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.usefixtures("no_gpus")
@pytest.mark.parametrize(
    ("arguments", "world_size", "reason"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG]
)
def test_a_wrong_configuration_is_refused_with_its_reason_in_one_line(
    arguments: str, world_size: int, reason: str
) -> None:
    """Cases P14 (split points and degrees), D6 (a global batch that would be floored), O2 (misspelled keys), O4 (types,
    negative numbers, unknown schedules)."""
    report = report_of(*arguments.split(), world_size=world_size)
    assert reason in report
    assert "\n" not in report
    assert report.startswith(("command line: ", "train_configs/"))


def test_there_are_more_than_forty_of_them_all_different() -> None:
    assert len({case[1] for case in WRONG}) == len(WRONG) > 40


@pytest.mark.parametrize("name", ["key misspelled", "stages over layers", "model unknown", "negative length"])
def test_the_program_ends_with_exit_code_2_and_one_line_without_traceback(name: str, tmp_path: Path) -> None:
    arguments = next(case[1] for case in WRONG if case[0] == name)
    code = (
        "import sys\n"
        "from trainer.commands.main import main\n"
        "code = main(['plan', *sys.argv[1:]])\n"
        "assert 'torch' not in sys.modules\n"
        "sys.exit(code)"
    )
    result = run_python("-c", code, *arguments.split(), cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


KEYS = [
    *(key for key, _ in fields()),
    *(*legacy.RENAMED, *legacy.CONVERTED, *legacy.UNAVAILABLE, *legacy.GOVERNED, *legacy.TABLES),
    *("model.override.dim", "model.override.rope_scaling", "model.override", "training", "x", "x.y.z", "training.steps.x"),
    *("optimizer.beta1", "experimental.pipeline_parallel_microbatch_size"),
]  # fmt: skip
VALUES = st.recursive(
    st.sampled_from(
        ["3", "-1", "0", "1.5", "nan", "true", '""', '"layers.2"', "1979-05-27", "many", "none", "[", "{"]
    ),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]")
        | inner.map(lambda item: f"{{a = {item}}}")
    ),
    max_leaves=4,
)


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.tuples(st.sampled_from(KEYS), VALUES), min_size=1, max_size=4), st.none() | st.integers(1, 9)
)
def test_whatever_value_any_key_gets_there_is_a_configuration_or_a_report(
    pairs: list[tuple[str, str]], world_size: int | None
) -> None:
    report = ""
    try:
        check(load([f"--{key}={value}" for key, value in pairs]).config, world_size)
    except ConfigurationError as error:
        report = str(error)
    assert all(line.startswith(("command line: ", "train_configs/")) for line in report.splitlines())
