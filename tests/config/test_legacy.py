"""Files of torchtitan: old spellings are understood with a notice, missing functions are refused by name."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import pytest

from tests.config.reports import ROOT, config_of, report_of
from trainer.config import legacy
from trainer.config.describe import find_field
from trainer.config.load import load
from trainer.config.schema import Config

TORCHTITAN_0_2 = """\
[job]
dump_folder = "./outputs"
description = "Llama 3 debug training"
print_config = false

[profiling]
enable_profiling = false

[metrics]
log_freq = 1
save_for_all_ranks = false

[model]
name = "llama3"
flavor = "debugmodel"
converters = []

[optimizer]
name = "AdamW"
lr = 8e-4
beta2 = 0.99
implementation = "for-loop"

[lr_scheduler]
warmup_steps = 2
decay_ratio = 0.8
decay_type = "linear"
min_lr_factor = 0.0

[training]
local_batch_size = 8
global_batch_size = -1
seq_len = 2048
steps = 10
dataset = "c4_test"

[training.dataloader]
num_workers = 0

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
fsdp_reshard_after_forward = "default"
tensor_parallel_degree = 1
enable_async_tensor_parallel = false
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
pipeline_parallel_microbatch_size = 2
context_parallel_degree = 1

[checkpoint]
enable = true
last_save_model_only = false
async_mode = "disabled"

[activation_checkpoint]
mode = "selective"
selective_ac_option = "2"

[compile]
enable = false
components = ["model", "loss"]

[quantize.linear.float8]
enable_fsdp_float8_all_gather = false
filter_fqns = ["output"]

[fault_tolerance]

[debug]
seed = 3
"""


def test_a_file_of_torchtitan_0_2_loads_with_one_notice_for_each_old_spelling(tmp_path: Path) -> None:
    path = tmp_path / "debug_model.toml"
    path.write_text(TORCHTITAN_0_2, encoding="utf-8")
    loaded = load(["--config", str(path)])
    config = loaded.config
    assert (config.model.flavor, config.training.dataset) == ("debug", "python_docs")
    assert (config.training.batch_size, config.training.global_batch_size) == (8, None)
    assert (config.training.warmup_steps, config.training.seed) == (2, 3)
    assert config.optimizer.betas == (0.9, 0.99)
    assert config.optimizer.fused is False
    assert config.metrics.rank_0_only is True
    assert config.checkpoint.enable_checkpoint is True
    assert config.experimental.pipeline_parallel_degree == 2
    assert config.experimental.pipeline_parallel_microbatches == 4
    assert (
        f"{path}:31: training.local_batch_size = 8 is spelled training.batch_size = 8 today" in loaded.notices
    )
    assert len(loaded.notices) == len(set(loaded.notices)) == 25


def test_a_file_of_january_2025_needs_no_notice(tmp_path: Path) -> None:
    path = tmp_path / "debug_model.toml"
    path.write_text(
        """\
[job]
dump_folder = "./outputs"
use_for_integration_test = true
[model]
name = "llama3"
norm_type = "rmsnorm"
[optimizer]
name = "AdamW"
lr = 8e-4
[training]
batch_size = 8
seq_len = 2048
warmup_steps = 2
max_norm = 1.0
steps = 10
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 1
compile = false
[experimental]
context_parallel_degree = 1
pipeline_parallel_degree = 1
enable_async_tensor_parallel = false
[checkpoint]
enable_checkpoint = false
folder = "checkpoint"
interval_type = "steps"
model_weights_only = false
export_dtype = "float32"
async_mode = "disabled"
[activation_checkpoint]
mode = 'selective'
selective_ac_option = '2'
[float8]
enable_float8_linear = false
""",
        encoding="utf-8",
    )
    assert load(["--config", str(path)]).notices == ()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--parallelism.expert_tensor_parallel_degree 2", "command line: --parallelism.expert_tensor_parallel_degree 2: known from torchtitan, not available in Stageline 0.1.0; allowed: 1"),
        ("--compile.components [\"loss\"]", "allowed: [\"model\"] or [\"model\", \"loss\"]"),
        ("--experimental.enable_compiled_autograd", "allowed: false"),
        ("--float8.force_recompute_fp8_weight_in_bwd", "known from torchtitan"),
        ("--model.converters [\"mx\"]", "a list is no boolean"),
        ("--checkpoint.load_only", "known from torchtitan"),
        ("--lr_scheduler.total_steps 30", "allowed: leaving it out"),
        ("--validation.dataloader.num_workers 8", "allowed: 0"),
        ("--activation_checkpoint.visualize_memory_budget_pareto", "allowed: false"),
        ("--parallelism.context_parallel_load_balancer ptrr", '"ptrr" is known from torchtitan'),
        ("--float8.emulat true", "unknown key"),
        ("--parallelism.pipeline_parallel_degre 2", "unknown table [parallelism]; did you mean experimental.pipeline_parallel_degree?"),
        ("--experimental.pipeline_parallel_microbatch_size 0", "is no size of a microbatch"),
        ("--training.local_batch_size 3.5", "command line: --training.local_batch_size 3.5: a float is no integer"),
        ("--training.local_batch_size 3 --training.batch_size 4", "is given twice, as training.local_batch_size and as training.batch_size"),
    ],
)  # fmt: skip
def test_functions_that_are_not_here_and_slips_in_old_spellings_are_refused_by_name(
    arguments: str, reason: str
) -> None:
    report = report_of(*arguments.split())
    assert reason in report
    assert "\n" not in report


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        ("--training.dataloader.num_workers 8", "data.workers", 8),
        ("--metrics.save_for_all_ranks", "metrics.rank_0_only", False),
        ("--training.dataset c4", "training.dataset", "allenai/c4:en"),
        ("--training.dataset c4_test --training.dataset_path tests", "training.dataset", "jsonl"),
        ("--model.norm_type fused_rmsnorm", "model.norm_type", "rmsnorm"),
        ("--model.hf_assets_path tests", "model.tokenizer_path", "tests"),
        ("--optimizer.implementation fused", "optimizer.fused", True),
        ("--optimizer.beta1 0.5", "optimizer.betas", (0.5, 0.95)),
        ('--model.converters ["quantize.linear.float8"]', "float8.enable_float8_linear", True),
        ("--quantize.linear.float8.filter_fqns output", "float8.filter_fqns", ("output",)),
        ("--training.data_parallel_degree 1", "training.data_parallel_shard_degree", 1),
        (
            "--parallelism.pipeline_parallel_microbatch_size 3",
            "experimental.pipeline_parallel_microbatches",
            3,
        ),
        (
            '--parallelism.module_fqns_per_model_part [["tok_embeddings","layers.0"],["layers.1","norm"]]',
            "experimental.pipeline_parallel_split_points",
            ("layers.1",),
        ),
    ],
)
def test_what_is_said_otherwise_here_is_converted(arguments: str, key: str, value: object) -> None:
    table, name = key.split(".")
    loaded = load(arguments.split())
    assert getattr(getattr(loaded.config, table), name) == value
    assert len(loaded.notices) == 1
    assert f"spelled {key}" in loaded.notices[0]


def test_an_old_spelling_on_the_command_line_goes_before_todays_in_the_file() -> None:
    assert config_of("--training.local_batch_size", "3").training.batch_size == 3


def test_the_old_name_of_the_configuration_file_is_understood() -> None:
    path = ROOT / "train_configs" / "llama_8b.toml"
    assert load(["--job.config_file", str(path)]).config.model.flavor == "8B"


def test_every_old_name_leads_to_a_key_that_exists_or_is_listed_as_unavailable() -> None:
    targets = [*legacy.RENAMED.values(), *(each.key for each in legacy.CONVERTED.values())]
    elsewhere = {*legacy.UNAVAILABLE, *legacy.GOVERNED, *legacy.CONVERTED}
    elsewhere.add("experimental.pipeline_parallel_microbatch_size")
    assert [key for key in targets if find_field(key) is None and key not in elsewhere] == []
    assert [key for key in legacy.VALUES if find_field(key) is None] == []


def test_no_key_of_ours_is_called_unavailable_or_old() -> None:
    ours = {
        f"{table}.{key}" for table, field in Config.model_fields.items() for key in field.annotation.model_fields
    }  # fmt: skip
    listed: tuple[object, ...] = (legacy.RENAMED, legacy.CONVERTED, legacy.UNAVAILABLE, legacy.GOVERNED)
    for names in listed:
        assert isinstance(names, MappingProxyType | frozenset)
        assert ours.isdisjoint(names)
