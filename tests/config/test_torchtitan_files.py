"""Files in the spelling of three epochs of torchtitan, twelve of each: what they mean here, whatever the spelling.

They were written for this test, with the keys that torchtitan had in January 2025, in 0.1 and in 0.2.2.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.config.reports import report_of
from trainer.commands.main import main
from trainer.config.load import given_to_toml, load
from trainer.config.rules import check

FILES = Path(__file__).with_name("torchtitan")
EPOCHS = ("january_2025", "0.1", "0.2.2")

_8B = {
    "model.flavor": "8B",
    "training.dataset": "allenai/c4:en",
    "training.max_norm": 1.0,
    "optimizer.name": "AdamW",
}
_DEBUG = {
    "model.flavor": "debug",
    "model.override": {"n_layers": 6, "n_heads": 16, "n_kv_heads": 16, "ffn_hidden": 768},
    "training.dataset": "python_docs",
}

MEANING: dict[str, dict[str, Any]] = {
    "debug_model": {
        **_DEBUG,
        "job.description": "Llama 3 debug training",
        "optimizer.lr": 8e-4,
        "optimizer.betas": (0.9, 0.95),
        "training.warmup_steps": 2,
        "training.batch_size": 8,
        "training.global_batch_size": None,
        "training.seq_len": 2048,
        "training.steps": 10,
        "training.data_parallel_shard_degree": -1,
        "activation_checkpoint.mode": "selective",
        "activation_checkpoint.selective_ac_option": "2",
    },
    "llama3_8b": {
        **_8B,
        "optimizer.lr": 3e-4,
        "training.batch_size": 1,
        "training.seq_len": 8192,
        "training.warmup_steps": 200,
        "activation_checkpoint.selective_ac_option": "op",
        "profiling.enable_profiling": True,
        "profiling.profile_freq": 100,
        "metrics.enable_tensorboard": True,
    },
    "llama3_70b": {
        **_8B,
        "model.flavor": "70B",
        "training.tensor_parallel_degree": 8,
        "training.disable_loss_parallel": True,
        "experimental.enable_async_tensor_parallel": True,
        "training.compile": True,
        "activation_checkpoint.mode": "full",
    },
    "llama3_405b": {
        **_8B,
        "model.flavor": "405B",
        "training.compile": True,
        "float8.enable_float8_linear": True,
        "float8.enable_fsdp_float8_all_gather": True,
        "float8.precompute_float8_dynamic_scale_for_fsdp": True,
    },
    "pipeline": {
        **_8B,
        "training.data_parallel_shard_degree": 2,
        "experimental.pipeline_parallel_degree": 4,
        "experimental.pipeline_parallel_schedule": "Interleaved1F1B",
        "experimental.pipeline_parallel_split_points": tuple(f"layers.{layer}" for layer in range(4, 32, 4)),
        "experimental.pipeline_parallel_microbatches": 8,
    },
    "zero_bubble": {
        **_8B,
        "experimental.pipeline_parallel_degree": 4,
        "experimental.pipeline_parallel_schedule": "ZBVZeroBubble",
        "experimental.pipeline_parallel_microbatches": 6,
        "activation_checkpoint.mode": "none",
    },
    "context": {
        **_8B,
        "training.seq_len": 131072,
        "experimental.context_parallel_degree": 8,
        "experimental.context_parallel_rotate_method": "alltoall",
    },
    "hybrid_sharding": {
        **_8B,
        "training.data_parallel_replicate_degree": 2,
        "training.data_parallel_shard_degree": 4,
        "training.enable_cpu_offload": True,
        "training.mixed_precision_param": "bfloat16",
        "training.mixed_precision_reduce": "float32",
    },
    "checkpoints": {
        **_8B,
        "checkpoint.enable_checkpoint": True,
        "checkpoint.folder": "saved",
        "checkpoint.interval": 100,
        "checkpoint.interval_type": "steps",
        "checkpoint.model_weights_only": True,
        "checkpoint.export_dtype": "bfloat16",
        "checkpoint.async_mode": "async_with_pinned_mem",
        "checkpoint.keep_latest_k": 3,
        "checkpoint.exclude_from_loading": ("lr_scheduler", "dataloader"),
    },
    "observed": {
        **_DEBUG,
        "job.dump_folder": "./outputs/observed",
        "metrics.enable_wandb": True,
        "metrics.rank_0_only": False,
        "profiling.enable_memory_snapshot": True,
        "comm.init_timeout_seconds": 600,
        "comm.train_timeout_seconds": 60,
        "comm.trace_buf_size": 1000,
    },
    "repeatable": {
        **_DEBUG,
        "optimizer.name": "Adam",
        "optimizer.fused": True,
        "training.warmup_steps": 0,
        "training.seed": 42,
        "training.deterministic": True,
        "training.gc_freq": 10,
        "checkpoint.create_seed_checkpoint": True,
    },
    "own_text": {
        **_8B,
        "training.dataset": "jsonl",
        "training.dataset_path": "tests",
        "model.tokenizer_path": "tests",
    },
}

# What only some epochs could say.
BESIDES: dict[tuple[str, str], dict[str, Any]] = {
    ("own_text", "january_2025"): {"model.norm_type": "layernorm", "lr_scheduler.decay_ratio": None},
    ("own_text", "0.1"): {
        "lr_scheduler.decay_ratio": 0.2,
        "lr_scheduler.decay_type": "cosine",
        "lr_scheduler.min_lr_factor": 0.1,
    },
    ("own_text", "0.2.2"): {
        "lr_scheduler.decay_ratio": 0.2,
        "lr_scheduler.decay_type": "cosine",
        "lr_scheduler.min_lr_factor": 0.1,
    },
    ("llama3_405b", "0.1"): {"float8.filter_fqns": ("output",)},
    ("llama3_405b", "0.2.2"): {"float8.filter_fqns": ("output",)},
    ("zero_bubble", "0.1"): {"experimental.pipeline_parallel_layers_per_stage": 4},
    ("zero_bubble", "0.2.2"): {"experimental.pipeline_parallel_layers_per_stage": 4},
}


def test_there_are_twelve_files_of_each_epoch() -> None:
    for epoch in EPOCHS:
        assert {path.stem for path in (FILES / epoch).glob("*.toml")} == set(MEANING)


@pytest.mark.parametrize("epoch", EPOCHS)
@pytest.mark.parametrize("name", MEANING)
def test_a_file_is_accepted_means_what_it_says_and_is_written_in_todays_spelling(
    name: str, epoch: str, tmp_path: Path
) -> None:
    loaded = load(["--config", str(FILES / epoch / f"{name}.toml")])
    assert check(loaded.config, None) == []
    for key, value in {**MEANING[name], **BESIDES.get((name, epoch), {})}.items():
        table, _, last = key.partition(".")
        assert getattr(getattr(loaded.config, table), last) == value, key
    today = tmp_path / "today.toml"
    today.write_text(given_to_toml(loaded), encoding="utf-8")
    again = load(["--config", str(today)])
    assert again.config == loaded.config
    assert not [notice for notice in again.notices if " is spelled " in notice]


def test_every_key_of_0_2_2_at_its_default_is_accepted() -> None:
    """all_keys.toml has every key that torchtitan 0.2.2 knows and that has a default, with it."""
    path = FILES / "all_keys_of_0.2.2.toml"
    report = report_of("--config", str(path))
    assert report == ""


def test_check_prints_what_maps_to_what_and_writes_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = FILES / "0.2.2" / "debug_model.toml", tmp_path / "new.toml"
    assert main(["check", str(old), "--write", str(new)]) == 0
    out = capsys.readouterr().out
    assert "training.local_batch_size = 8 is spelled training.batch_size = 8 today" in out
    assert f"wrote {new}" in out
    assert main(["check", str(new)]) == 0
    assert "is spelled" not in capsys.readouterr().out
    assert main(["check", str(old), "--write", str(new)]) == 2, "an existing file is not written over"
    assert main(["check", str(old), str(new), "--write", str(tmp_path / "x.toml")]) == 2


@pytest.mark.parametrize(
    ("name", "flavor", "expected"),
    [
        ("llama3", "8B_flex", {"data.mask_documents": True, "model.flavor": "8B"}),
        ("llama3", "8B_varlen", {"data.mask_documents": True, "model.attention": "flash"}),
        ("qwen3", "30B-A3B", {"model.name": "qwen3_moe", "model.flavor": "30B-A3B"}),
        ("qwen3", "debugmodel_moe", {"model.name": "qwen3_moe"}),
        ("qwen3", "debugmodel", {"model.name": "qwen3"}),
        ("deepseek_v3", "debugmodel", {"model.name": "deepseek_v3"}),
        ("deepseek_v3", "671B", {"model.flavor": "671B"}),
    ],
)
def test_flavors_are_those_of_ours_that_have_their_sizes(
    name: str, flavor: str, expected: dict[str, Any]
) -> None:
    config = load(["--model.name", name, "--model.flavor", flavor]).config
    assert check(config, None) == []
    for key, value in expected.items():
        table, _, last = key.partition(".")
        assert getattr(getattr(config, table), last) == value


def test_flavors_that_are_not_here_are_refused_with_those_that_are() -> None:
    report = report_of("--model.name", "deepseek_v3", "--model.flavor", "236B", world_size=1)
    assert "debug, 16B, 671B" in report
