"""Spellings and keys of torchtitan, from its first releases to 0.2.2, in one table each.

- `RENAMED` and `CONVERTED`: what means the same here under another name. Accepted, with one notice.
- `VALUES`: values that are called otherwise here. Accepted, with one notice.
- `UNAVAILABLE`: functions that Stageline does not have. The neutral value (the function is off) is accepted in
  silence, any other is refused by name: nothing that a file asks for is quietly left out.
- `GOVERNED`: details of those functions, without effect while they are off.

The canonical keys are those of January 2025, so files of that time need nothing from here but the values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

_PARALLELISM = {
    **{
        f"parallelism.{key}": f"training.{key}"
        for key in (
            "data_parallel_replicate_degree",
            "data_parallel_shard_degree",
            "fsdp_reshard_after_forward",
            "tensor_parallel_degree",
            "disable_loss_parallel",
        )
    },
    **{
        f"parallelism.{key}": f"experimental.{key}"
        for key in (
            "pipeline_parallel_degree",
            "pipeline_parallel_schedule",
            "pipeline_parallel_schedule_csv",
            "pipeline_parallel_split_points",
            "pipeline_parallel_layers_per_stage",
            "pipeline_parallel_microbatches",
            "pipeline_parallel_microbatch_size",
            "pipeline_parallel_first_stage_less_layers",
            "pipeline_parallel_last_stage_less_layers",
            "pipeline_parallel_expert_parallel_overlap",
            "context_parallel_degree",
            "context_parallel_rotate_method",
            "context_parallel_load_balancer",
            "expert_parallel_degree",
            "expert_tensor_parallel_degree",
            "expert_parallel_comm_backend",
            "enable_async_tensor_parallel",
            "enable_compiled_autograd",
            "module_fqns_per_model_part",
        )
    },
}

RENAMED = MappingProxyType(
    {
        **_PARALLELISM,
        "training.local_batch_size": "training.batch_size",
        "training.data_parallel_degree": "training.data_parallel_shard_degree",
        "training.pipeline_parallel_degree": "experimental.pipeline_parallel_degree",
        "lr_scheduler.warmup_steps": "training.warmup_steps",
        "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
        "model.hf_assets_path": "model.tokenizer_path",
        "job.print_config": "job.print_args",
        "checkpoint.enable": "checkpoint.enable_checkpoint",
        "checkpoint.last_save_model_only": "checkpoint.model_weights_only",
        "checkpoint.last_save_model_weights_only": "checkpoint.model_weights_only",
        "checkpoint.initial_load_model_weights_only": "checkpoint.initial_load_model_only",
        "training.dataloader.num_workers": "data.workers",
        "validation.local_batch_size": "validation.batch_size",
        "debug.seed": "training.seed",
        "debug.deterministic": "training.deterministic",
        "debug.moe_force_load_balance": "training.debug_moe_force_load_balance",
        "compile.enable": "training.compile",
        "compile.backend": "training.compile_backend",
        "training.enable_float8_linear": "float8.enable_float8_linear",
        "training.enable_fp8_linear": "float8.enable_float8_linear",
        **{
            f"quantize.linear.float8.{key}": f"float8.{key}"
            for key in (
                "emulate",
                "enable_fsdp_float8_all_gather",
                "filter_fqns",
                "precompute_float8_dynamic_scale_for_fsdp",
                "recipe_name",
            )
        },
    }
)


@dataclass(frozen=True)
class Conversion:
    """A key whose value, too, is said otherwise. `convert` returns what it cannot convert as it is."""

    key: str
    convert: Callable[[object], object]


def _inverted(value: object) -> object:
    return not value if isinstance(value, bool) else value


def _fused(value: object) -> object:
    known = {"fused": True, "foreach": False, "for-loop": False}
    return known.get(value, value) if isinstance(value, str) else value


def _float8(value: object) -> object:
    known = {"": False, "float8": True, "quantize.linear.float8": True}
    names = ",".join(map(str, value)) if isinstance(value, list) else value
    return known.get(names, value) if isinstance(names, str) else value


def _first_of_each(value: object) -> object:
    parts = value if isinstance(value, list) else []
    if not parts or not all(isinstance(part, list) and part for part in parts):
        return value
    return [part[0] for part in parts[1:]]


CONVERTED = MappingProxyType(
    {
        "metrics.save_for_all_ranks": Conversion("metrics.rank_0_only", _inverted),
        "metrics.enable_color_printing": Conversion("metrics.disable_color_printing", _inverted),
        "training.enable_loss_parallel": Conversion("training.disable_loss_parallel", _inverted),
        "model.converters": Conversion("float8.enable_float8_linear", _float8),
        "optimizer.implementation": Conversion("optimizer.fused", _fused),
        "experimental.module_fqns_per_model_part": Conversion(
            "experimental.pipeline_parallel_split_points", _first_of_each
        ),
    }
)

VALUES = MappingProxyType(
    {
        "model.name": {"llama": "llama3"},
        "model.norm_type": {"fused_rmsnorm": "rmsnorm"},
        "training.dataset": {
            "c4": "allenai/c4:en",
            "c4_validation": "allenai/c4:en@validation",
            "c4_test": "python_docs",
            "c4_mini": "python_docs",
        },
        "validation.dataset": {
            "c4": "allenai/c4:en",
            "c4_validation": "allenai/c4:en@validation",
            "c4_test": "python_docs",
        },
        "experimental.pipeline_parallel_schedule": {"flexible_interleaved_1f1b": "Interleaved1F1B"},
    }
)

UNSET_BY = MappingProxyType(
    {
        "training.global_batch_size": -1,
        "training.dataset_path": "",
        "checkpoint.initial_load_path": "",
        "validation.dataset_path": "",
        "experimental.pipeline_parallel_schedule_csv": "",
    }
)
"""Values by which torchtitan says that a key is not set."""

UNAVAILABLE = MappingProxyType(
    {
        "job.use_for_integration_test": (False, True),  # a mark for torchtitan's own tests
        "job.custom_config_module": ("",),
        "job.save_config_file": (),
        "profiling.profiler_active": (1,),
        "profiling.profiler_warmup": (3,),
        "model.print_after_conversion": (False,),
        "optimizer.early_step_in_backward": (False,),
        "lr_scheduler.total_steps": (),
        "training.data_parallel_type": ("fsdp",),
        "training.fp8_linear": ("",),
        "training.gc_debug": (False,),
        "training.dtype": ("float32",),
        "validation.dataloader.num_workers": (0,),
        "debug.deterministic_warn_only": (False,),
        "experimental.expert_tensor_parallel_degree": (1,),
        "experimental.enable_compiled_autograd": (False,),
        "experimental.pipeline_parallel_first_stage_less_layers": (1,),
        "experimental.pipeline_parallel_last_stage_less_layers": (1,),
        "experimental.custom_import": ("",),
        "experimental.custom_args_module": ("",),
        "checkpoint.initial_load_in_hf_quantized": (False, True),  # config.json says it
        "checkpoint.enable_first_step_checkpoint": (False,),
        "checkpoint.load_only": (False,),
        "checkpoint.enable_ft_dataloader_checkpoints": (True,),
        "activation_checkpoint.early_stop": (False, True),  # the same activations either way
        "activation_checkpoint.preserve_rng_state": (True, False),  # nothing in a layer is random
        "activation_checkpoint.determinism_check": ("default",),
        "activation_checkpoint.debug": (False,),
        # With "op": routers, whose products are small and are not worth an own list.
        "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": (("moe.router.gate",), ()),
        "activation_checkpoint.visualize_memory_budget_pareto": (False,),
        # The loss is never compiled; the result is the same.
        "compile.components": (("model",), ("model", "loss")),
        "float8.force_recompute_fp8_weight_in_bwd": (False,),
        "float8.moe_fqns_prototype": ((),),
        "comm.save_traces_folder": ("comm_traces",),
        "comm.save_traces_file_prefix": ("rank_",),
        "comm.mode": ("default",),
        "memory_estimation.enable": (False,),
        "memory_estimation.enabled": (False,),
        "fault_tolerance.enable": (False,),
    }
)
"""The values of each key that leave its function off. A list is written as a tuple."""

UNAVAILABLE_VALUES = MappingProxyType(
    {
        "experimental.context_parallel_load_balancer": ("ptrr",),  # for FlexAttention
    }
)
"""Values of keys that Stageline has, for functions that it does not have."""

GOVERNED = frozenset(
    {
        "experimental.expert_parallel_comm_backend",
        "experimental.pipeline_parallel_expert_parallel_overlap",
        "fault_tolerance.fragment_sync_delay",
        "fault_tolerance.fragment_update_alpha",
        "fault_tolerance.group_size",
        "fault_tolerance.min_replica_size",
        "fault_tolerance.process_group",
        "fault_tolerance.process_group_timeout_ms",
        "fault_tolerance.replica_id",
        "fault_tolerance.semi_sync_method",
        "fault_tolerance.should_quantize",
        "fault_tolerance.sync_steps",
        "memory_estimation.disable_fake_mode",
        "mx.filter_fqns",
        "mx.moe_fqns_prototype",
        "mx.mxfp8_dim1_cast_kernel_choice",
        "mx.recipe_name",
        "mx.use_fp8_dim1_cast_triton_kernel",
        "quantize.grouped_mm",
        "quantize.linear.mx",
        # Workers here last as long as the run and read ahead, and their batches are page-locked where it helps.
        *(
            f"{table}.dataloader.{key}"
            for table in ("training", "validation")
            for key in ("persistent_workers", "pin_memory", "prefetch_factor")
        ),
    }
)
"""Keys that change only how a function works that is off, or how fast one is that works otherwise here."""

_LLAMA3_DEBUG = {"n_layers": 6, "n_heads": 16, "n_kv_heads": 16, "ffn_hidden": 768}
_QWEN3_DEBUG = {"n_heads": 16, "n_kv_heads": 8, "head_dim": 128}
_DEEPSEEK_V3_DEBUG = {
    "n_layers": 6,
    "n_heads": 16,
    "q_lora_rank": 0,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "ffn_hidden": 1024,
    "expert_hidden": 256,
    "n_experts": 8,
    "n_experts_per_token": 3,
    "n_shared_experts": 2,
    "n_expert_groups": 1,
    "n_groups_per_token": 1,
}
_FLEX: dict[str, object] = {"model.attention": "auto", "data.mask_documents": True}
_VARLEN: dict[str, object] = {"model.attention": "flash", "data.mask_documents": True}


def _flavor(name: str, flavor: str, sizes: Mapping[str, object] = MappingProxyType({})) -> dict[str, object]:
    return {
        "model.name": name,
        "model.flavor": flavor,
        **{f"model.override.{key}": value for key, value in sizes.items()},
    }


FLAVORS = MappingProxyType(
    {
        ("llama3", "debugmodel"): _flavor("llama3", "debug", _LLAMA3_DEBUG),
        ("llama3", "debugmodel_flex_attn"): _flavor("llama3", "debug", _LLAMA3_DEBUG) | _FLEX,
        ("llama3", "debugmodel_varlen_attn"): _flavor("llama3", "debug", _LLAMA3_DEBUG) | _VARLEN,
        ("llama3", "8B_flex"): _flavor("llama3", "8B") | _FLEX,
        ("llama3", "8B_varlen"): _flavor("llama3", "8B") | _VARLEN,
        ("qwen3", "debugmodel"): _flavor(
            "qwen3", "debug", {**_QWEN3_DEBUG, "ffn_hidden": 3072, "tie_embeddings": True}
        ),
        ("qwen3", "debugmodel_moe"): _flavor(
            "qwen3_moe",
            "debug",
            {**_QWEN3_DEBUG, "expert_hidden": 768, "n_experts": 64, "n_experts_per_token": 8},
        ),
        ("deepseek_v3", "debugmodel"): _flavor("deepseek_v3", "debug", _DEEPSEEK_V3_DEBUG),
        ("deepseek_v3", "debugmodel_flex_attn"): _flavor("deepseek_v3", "debug", _DEEPSEEK_V3_DEBUG) | _FLEX,
        ("qwen3", "30B-A3B"): _flavor("qwen3_moe", "30B-A3B"),
        ("qwen3", "235B-A22B"): _flavor("qwen3_moe", "235B-A22B"),
    }
)
"""Models of torchtitan that are called otherwise here, by name and flavor, as today's keys. Its debug models have other
sizes than ours, and some flavors choose how attention is computed."""

TABLES = frozenset(
    key.partition(".")[0] for keys in (RENAMED, CONVERTED, UNAVAILABLE, GOVERNED) for key in keys
)
"""Tables of torchtitan that may stand in a file with nothing in them."""

SUBTABLES = frozenset(
    {"training.dataloader", "validation.dataloader", "quantize.linear", "quantize.linear.float8"}
)
"""Tables within tables whose keys are looked at one by one."""
