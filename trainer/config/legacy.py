"""Spellings and keys of torchtitan, from its first releases to 0.2.2, in one table each.

- `RENAMED` and `CONVERTED`: what means the same here under another name. Accepted, with one notice.
- `VALUES`: values that are called otherwise here. Accepted, with one notice.
- `UNAVAILABLE`: functions that Stageline does not have. The neutral value (the function is off) is accepted in
  silence, any other is refused by name: nothing that a file asks for is quietly left out.
- `GOVERNED`: details of those functions, without effect while they are off.

The canonical keys are those of January 2025, so files of that time need nothing from here but the values.
"""

from __future__ import annotations

from collections.abc import Callable
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
        "model.flavor": {"debugmodel": "debug"},
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
        **{
            f"{table}.dataloader.{key}": neutral
            for table in ("training", "validation")
            for key, neutral in (
                ("num_workers", (0,)),
                ("persistent_workers", (False,)),
                ("pin_memory", (False,)),
                ("prefetch_factor", ()),
            )
        },
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
        "validation.steps": (-1,),
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
    }
)
"""Keys that change only how a function works that is off."""

TABLES = frozenset(
    key.partition(".")[0] for keys in (RENAMED, CONVERTED, UNAVAILABLE, GOVERNED) for key in keys
)
"""Tables of torchtitan that may stand in a file with nothing in them."""

SUBTABLES = frozenset(
    {"training.dataloader", "validation.dataloader", "quantize.linear", "quantize.linear.float8"}
)
"""Tables within tables whose keys are looked at one by one."""
