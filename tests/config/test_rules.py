"""Every rule in both directions: what it refuses, with which words, and what it lets pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.config.reports import config_of, report_of, rules_broken
from trainer.config.load import load
from trainer.config.machine import Machine
from trainer.config.rules import (
    attention,
    blocks,
    checkpoint,
    collect,
    context,
    data,
    expert,
    machine,
    model,
    notices,
    pipeline,
    tensor,
    training,
)

PP = "--experimental.pipeline_parallel_"
DP = "--training.data_parallel_"
ASYNC = "--experimental.enable_async_tensor_parallel"
INTERLEAVED = (f"{PP}schedule", "Interleaved1F1B")
BUDGET = ("--activation_checkpoint.mode", "memory_budget")
MIXTURE = ("--model.name", "qwen3_moe")
FLOAT8 = ("--float8.enable_float8_linear",)
GATHER = ("--float8.enable_fsdp_float8_all_gather",)
SCALES = ("--float8.precompute_float8_dynamic_scale_for_fsdp",)


def ranks(count: int) -> tuple[str, str]:
    return (f"{PP}degree", str(count))


def cp(degree: int, *keys: str) -> tuple[str, ...]:
    """Context ranks; further keys in pairs, without the beginning that they share."""
    more = [
        f"--experimental.context_parallel_{key}" if index % 2 == 0 else key for index, key in enumerate(keys)
    ]
    return ("--experimental.context_parallel_degree", str(degree), *more)


def ep(degree: int) -> tuple[str, str]:
    return ("--experimental.expert_parallel_degree", str(degree))


def tp(degree: int) -> tuple[str, str]:
    return ("--training.tensor_parallel_degree", str(degree))


def sources(*names: str) -> str:
    """A list of data sources, as on the command line."""
    return f"[{', '.join(f'{{name = {name!r}}}' for name in names)}]"


# Rule, arguments that it lets pass, arguments that it refuses, what it says.
CASES = [
    (model.name_is_a_known_family, ["--model.name", "llama2", "--model.flavor", "7B"], ["--model.name", "lama3"], "did you mean llama3"),
    (model.flavor_is_one_of_the_family, ["--model.flavor", "8B"], ["--model.flavor", "8b"], "did you mean 8B"),
    (model.overrides_are_sizes_of_the_family, ["--model.override.dim", "64"], ["--model.override.dims", "64"], "did you mean model.override.dim"),
    (model.overrides_are_sizes_of_the_family, ["--model.override.norm_eps", "1"], ["--model.override.dim", "64.0"], "allowed: integer"),
    (model.overrides_are_sizes_of_the_family, ["--model.override.tie_embeddings"], ["--model.override.tie_embeddings", "1"], "allowed: true or false"),
    (model.overrides_are_sizes_of_the_family, ["--model.norm_type", "layernorm"], ["--model.override.norm_type", "layernorm"], "did you mean model.norm_type"),
    (model.overrides_are_sizes_of_the_family, ["--model.override.rope_scaling", "{factor = 8}"], ["--model.override.rope_scaling", "{factors = 8}"], "a table of factor"),
    (model.overrides_are_sizes_of_the_family, ["--model.override.rope_scaling", "false"], ["--model.override.rope_scaling", "{factor = true}"], "factor: number"),
    (model.sizes_fit_together, ["--model.override.n_heads", "4"], ["--model.override.n_heads", "3"], "dim 256 is not divisible by n_heads 3"),
    (model.sizes_fit_together, ["--model.override.n_kv_heads", "2"], ["--model.override.n_kv_heads", "3"], "n_heads 8 is not divisible by n_kv_heads 3"),
    (model.sizes_fit_together, ["--model.override.n_layers", "1"], ["--model.override.n_layers", "0"], "n_layers must be at least 1"),
    (tensor.tensor_parallel_degree_divides_the_model, [*tp(2)], [*tp(3)], "n_heads 8 is not divisible by 3; ffn_hidden 512 is not divisible by 3"),
    (tensor.tensor_parallel_degree_divides_the_model, [*tp(8)], [*tp(16)], "allowed: 1, 2, 4 or 8; did you mean 8?"),
    (tensor.tensor_parallel_degree_divides_the_model, [*tp(8), "--model.override.n_kv_heads", "2"], [*tp(6), "--model.flavor", "8B", "--model.override.n_heads", "24", "--model.override.n_kv_heads", "4", "--model.override.dim", "3072"], "n_kv_heads 4 is not divisible by 6, nor 6 by 4; allowed: 1, 2, 4"),
    (tensor.tensor_parallel_degree_divides_the_model, [*tp(2), "--model.override.vocab_size", "258"], [*tp(4), "--model.override.vocab_size", "258"], "vocab_size 258 is not divisible by 4; allowed: 1 or 2; did you mean 2?"),
    (tensor.tensor_parallel_degree_divides_the_model, [*tp(4), "--model.name", "qwen3_moe"], [*tp(4), "--model.name", "qwen3_moe", "--model.override.expert_hidden", "90"], "expert_hidden 90 is not divisible by 4; allowed: 1 or 2"),
    (tensor.async_tensor_parallel_is_compiled, [*tp(2), ASYNC, "--training.compile"], [*tp(2), ASYNC], "is carried out by the compiler; allowed: false, or training.compile = true"),
    (tensor.async_tensor_parallel_is_compiled, [*tp(2)], [ASYNC, "--training.compile"], "has nothing to overlap"),
    (tensor.async_tensor_parallel_is_compiled, [], [*tp(2), ASYNC, "--training.compile", "--training.compile_backend", "aot_eager"], "by inductor alone"),
    (tensor.tensor_parallel_degree_divides_the_sequence, [*tp(2)], [*tp(2), "--training.seq_len", "33"], "allowed: multiples of 2; did you mean 32 or 34?"),
    (tensor.tensor_parallel_degree_divides_the_sequence, [*tp(2), "--validation.seq_len", "33"], [*tp(2), "--validation.enable", "--validation.seq_len", "33"], "validation.seq_len 33: is not divisible"),
    (tensor.tensor_parallel_degree_divides_the_sequence, [*tp(4), "--experimental.context_parallel_degree", "2"], [*tp(4), "--experimental.context_parallel_degree", "2", "--training.seq_len", "36"], "tensor_parallel_degree 4 × context_parallel_degree 2; allowed: multiples of 8"),
    (attention.attention_kernel_spans_context_ranks, ["--model.attention", "flex"], ["--model.attention", "flex", "--experimental.context_parallel_degree", "2"], "context parallelism by allgather has a kernel of its own; allowed: auto or sdpa, or"),
    (context.context_parallel_degree_divides_the_sequence, [*cp(4), "--training.seq_len", "40"], [*cp(4), "--training.seq_len", "36"], "training.seq_len 36: is not divisible into 8 chunks (2 for each of 4 context ranks); allowed: multiples of 8; did you mean 32 or 40?"),
    (context.context_parallel_degree_divides_the_sequence, [*cp(4, "load_balancer", "none"), "--training.seq_len", "36"], [*cp(4, "load_balancer", "none"), "--training.seq_len", "34"], "into 4 chunks (1 for each"),
    (context.context_parallel_degree_divides_the_sequence, [*cp(2), "--validation.seq_len", "34"], [*cp(2), "--validation.enable", "--validation.seq_len", "34"], "validation.seq_len 34: is not divisible"),
    (context.context_parallel_degree_divides_the_sequence, [*cp(2), *tp(3), "--training.seq_len", "33"], [*cp(2), *tp(3), "--training.seq_len", "18"], "allowed: multiples of 12; did you mean 12 or 24?"),
    (context.ulysses_divides_the_heads, cp(8, "rotate_method", "ulysses"), cp(3, "rotate_method", "ulysses"), "cannot divide 8 heads of queries and 4 of keys over 3 context ranks; allowed: allgather, alltoall, or experimental.context_parallel_degree 1 or 2 or 4 or 8"),
    (context.ulysses_divides_the_heads, [*cp(4, "rotate_method", "ulysses"), *tp(2)], [*cp(8, "rotate_method", "ulysses"), *tp(2)], "cannot divide 4 heads of queries and 2 of keys of a tensor rank (of 2) over 8 context ranks"),
    (expert.expert_parallelism_needs_experts, [*MIXTURE, *ep(2)], ep(2), "llama3 has no experts; allowed: 1, or a model with experts; did you mean 1?"),
    (expert.expert_parallel_degree_divides_the_experts, [*MIXTURE, *ep(4)], [*MIXTURE, *ep(3)], "does not divide the 16 experts of a layer; allowed: 1, 2, 4, 8 or 16; did you mean 2?"),
    (expert.expert_parallel_degree_divides_the_sharding_ranks, [*MIXTURE, *ep(4), f"{DP}shard_degree", "4"], [*MIXTURE, *ep(4), f"{DP}shard_degree", "2"], "does not divide data_parallel_shard_degree 2, over whose ranks experts are spread; allowed: 1 or 2; did you mean 2?"),
    (expert.expert_parallel_degree_divides_the_sharding_ranks, [*MIXTURE, *ep(4), *cp(2), f"{DP}shard_degree", "2"], [*MIXTURE, *ep(4), *cp(2), f"{DP}shard_degree", "1"], "shard_degree 1 × context_parallel_degree 2,"),
    (expert.spread_experts_are_sharded_evenly, [*MIXTURE, *ep(2), f"{DP}shard_degree", "16"], [*MIXTURE, *ep(2), f"{DP}shard_degree", "6"], "3 ranks hold the same 8 experts"),
    (model.balanced_models_have_experts, ["--model.name", "qwen3_moe", "--training.load_balance_loss", "0.01"], ["--training.load_balance_loss", "0.01"], "llama3 debug has no experts to balance; allowed: 0, or unset"),
    (model.balanced_models_have_experts, ["--model.name", "deepseek_v3", "--training.load_balance_rate", "0.01"], ["--model.name", "qwen3_moe", "--training.load_balance_rate", "0.01"], "balances its experts by the loss alone"),
    (model.balanced_models_have_experts, ["--model.name", "qwen3_moe", "--training.debug_moe_force_load_balance"], ["--training.debug_moe_force_load_balance"], "llama3 debug has no experts; allowed: false"),
    (model.sizes_fit_together, ["--model.name", "deepseek_v3", "--model.override.n_experts", "32"], ["--model.name", "deepseek_v3", "--model.override.n_expert_groups", "5"], "n_experts 16 is not divisible by n_expert_groups 5"),
    (training.gradients_are_reduced_no_coarser_than_computed, ["--training.mixed_precision_param", "bfloat16", "--training.mixed_precision_reduce", "bfloat16"], ["--training.mixed_precision_reduce", "bfloat16"], "more finely"),
    (training.parameters_stay_for_a_split_backward, ["--training.fsdp_reshard_after_forward", "always"], ["--training.fsdp_reshard_after_forward", "always", f"{PP}schedule", "ZBVZeroBubble"], "before the weight parts of ZBVZeroBubble"),
    (blocks.memory_budget_needs_compile, [*BUDGET, "--training.compile"], BUDGET, "is carried out by the compiler"),
    (blocks.float8_gathers_what_has_one_scale, [*FLOAT8, *GATHER], [*FLOAT8, *GATHER, "--float8.recipe_name", "rowwise"], "one for each row"),
    (blocks.float8_gathers_what_has_one_scale, GATHER, [*FLOAT8, *GATHER, "--training.tensor_parallel_degree", "2"], "tensor parallelism cuts them"),
    (blocks.float8_gathers_what_has_one_scale, [*FLOAT8, *GATHER, *SCALES], [*FLOAT8, *SCALES], "float8_all_gather = true"),
    (blocks.float8_filters_name_something, [*FLOAT8, "--float8.filter_fqns", "wk,output,auto_filter_small_kn"], [*FLOAT8, "--float8.filter_fqns", "attention.kw"], "attention.kw is in no name"),
    (blocks.float8_filters_name_something, ["--float8.filter_fqns", "nothing"], [*FLOAT8, "--float8.filter_fqns", "auto_filter_small_kn", "--float8.recipe_name", "rowwise_with_gw_hp"], "no measurements"),
    (training.load_step_needs_checkpoints, ["--checkpoint.load_step", "3"], ["--checkpoint.load_step", "3", "--checkpoint.enable_checkpoint", "false"], "checkpoint.enable_checkpoint = true"),
    (training.seed_checkpoint_needs_checkpoints, ["--checkpoint.create_seed_checkpoint"], ["--checkpoint.create_seed_checkpoint", "--checkpoint.enable_checkpoint", "false"], "no effect"),
    (training.export_dtype_needs_model_weights_only, ["--checkpoint.export_dtype", "float16", "--checkpoint.model_weights_only"], ["--checkpoint.export_dtype", "float16"], "applies only where"),
    (training.export_dtype_needs_model_weights_only, ["--checkpoint.export_dtype", "bfloat16", "--checkpoint.last_save_in_hf"], ["--checkpoint.export_dtype", "bfloat16"], "applies only where"),
    (training.files_stay_in_the_run_folder, ["--checkpoint.folder", "/scratch/run"], ["--checkpoint.folder", "../x"], "leads out of the run's folder"),
    (training.files_stay_in_the_run_folder, ["--metrics.save_tb_folder", "a/b"], ["--metrics.save_tb_folder", "/tmp/tb"], "did you mean tb?"),
    (training.rollback_needs_checkpoints, ["--training.nonfinite_policy", "rollback"], ["--training.nonfinite_policy", "rollback", "--checkpoint.enable_checkpoint", "false"], "checkpoint.enable_checkpoint is false"),
    (training.spike_policy_needs_a_threshold, ["--training.loss_spike_policy", "skip", "--training.loss_spike_threshold", "2.0"], ["--training.loss_spike_policy", "skip"], "no effect without training.loss_spike_threshold"),
    (checkpoint.excluded_parts_are_known, ["--checkpoint.exclude_from_loading", "optimizer,dataloader"], ["--checkpoint.exclude_from_loading", "optimiser"], "did you mean optimizer"),
    (checkpoint.initial_loading_needs_a_path, ["--checkpoint.initial_load_in_hf", "--checkpoint.initial_load_path", "x"], ["--checkpoint.initial_load_in_hf"], "has no effect without checkpoint.initial_load_path"),
    (checkpoint.initial_loading_needs_a_path, ["--checkpoint.initial_load_model_only"], ["--checkpoint.initial_load_model_only", "false"], "has no effect without checkpoint.initial_load_path"),
    (checkpoint.export_at_the_end_needs_checkpoints, ["--checkpoint.last_save_in_hf"], ["--checkpoint.last_save_in_hf", "--checkpoint.enable_checkpoint", "false"], "checkpoint.enable_checkpoint = true"),
    (checkpoint.exported_model_has_a_form_there, ["--checkpoint.last_save_in_hf"], ["--checkpoint.last_save_in_hf", "--model.norm_type", "layernorm"], "LlamaForCausalLM has rmsnorm only"),
    (checkpoint.folder_can_be_opened, ["--checkpoint.enable_checkpoint", "--checkpoint.folder", "memory://run"], ["--checkpoint.enable_checkpoint", "--checkpoint.folder", "nowhere://run"], "Protocol not known"),
    (checkpoint.folder_can_be_opened, ["--checkpoint.enable_checkpoint", "false", "--checkpoint.folder", "nowhere://run"], ["--checkpoint.enable_checkpoint", "--checkpoint.folder", "abfs://x/run"], "nstall"),
    (checkpoint.initial_weights_are_of_the_model, [], ["--checkpoint.initial_load_path", "/nonexistent"], "there is no such folder"),
    (checkpoint.initial_weights_are_of_the_model, ["--checkpoint.initial_load_path", str(Path(__file__).parent)], ["--checkpoint.initial_load_path", str(Path(__file__).parent), "--checkpoint.initial_load_in_hf"], "no Hugging Face folder"),
    (pipeline.schedule_is_known, [f"{PP}schedule", "interleaved_1f1b"], [f"{PP}schedule", "1F2B"], "did you mean 1F1B"),
    (pipeline.schedule_is_known, [f"{PP}schedule", "gpipe"], [f"{PP}schedule", "G-Pip"], "did you mean GPipe"),
    (pipeline.schedule_file_exists, [], [f"{PP}schedule_csv", "/nonexistent.csv"], "there is no such file"),
    (pipeline.stages_are_decided_once, [f"{PP}layers_per_stage", "4"], [f"{PP}layers_per_stage", "4", f"{PP}split_points", "layers.4"], "one of the two"),
    (pipeline.split_points_are_layers_in_order, [f"{PP}split_points", "layers.1,layers.7"], [f"{PP}split_points", "layers.99"], "layers.99 is no layer of the model; allowed: layers.1 to layers.7, in order, each once; did you mean layers.7?"),
    (pipeline.split_points_are_layers_in_order, [f"{PP}split_points", "layers.1"], [f"{PP}split_points", "layers.0"], "the embedding alone is no stage"),
    (pipeline.split_points_are_layers_in_order, [], [f"{PP}split_points", "layers.4,layers.2"], 'did you mean "layers.2,layers.4"'),
    (pipeline.split_points_are_layers_in_order, [], [f"{PP}split_points", "layers.4,layers.4"], "given twice"),
    (pipeline.split_points_are_layers_in_order, [], [f"{PP}split_points", "norm"], "norm is no layer"),
    (pipeline.stages_fill_the_ranks_evenly, [*ranks(2), f"{PP}split_points", "layers.4"], [*ranks(2), f"{PP}split_points", "layers.2,layers.4"], "2 split points make 3 stages, which 2 ranks cannot share evenly"),
    (pipeline.stages_fill_the_ranks_evenly, [*ranks(2), f"{PP}layers_per_stage", "4"], [*ranks(3), f"{PP}layers_per_stage", "4"], "makes 2 stages, which 3 ranks"),
    (pipeline.stages_fill_the_ranks_evenly, [*ranks(2), *INTERLEAVED, f"{PP}layers_per_stage", "2", f"{PP}stages_per_rank", "2"], [*ranks(2), *INTERLEAVED, f"{PP}layers_per_stage", "2", f"{PP}stages_per_rank", "3"], "on 2 ranks are 6"),
    (pipeline.stages_per_rank_fit_the_schedule, [*ranks(2), f"{PP}stages_per_rank", "1"], [*ranks(2), f"{PP}stages_per_rank", "2"], "1F1B does not exist with 2 stages per rank"),
    (pipeline.stages_per_rank_fit_the_schedule, [*ranks(2), *INTERLEAVED, f"{PP}stages_per_rank", "3"], [*ranks(2), *INTERLEAVED, f"{PP}stages_per_rank", "1"], "2 or more"),
    (pipeline.stages_per_rank_fit_the_schedule, [*ranks(2), f"{PP}schedule", "ZBVZeroBubble", f"{PP}stages_per_rank", "2"], [*ranks(2), f"{PP}schedule", "ZBVZeroBubble", f"{PP}stages_per_rank", "3"], "allowed: 2"),
    (pipeline.stages_per_rank_fit_the_schedule, [*ranks(2), *INTERLEAVED, f"{PP}split_points", "layers.2,layers.4,layers.6"], [*ranks(2), f"{PP}split_points", "layers.2,layers.4,layers.6"], "2 stages per rank"),
    (pipeline.stages_per_rank_fit_the_schedule, [*INTERLEAVED, f"{PP}stages_per_rank", "1"], [f"{PP}schedule", "V-Min", f"{PP}stages_per_rank", "1"], "allowed: 2"),
    (pipeline.stages_per_rank_fit_the_schedule, [*INTERLEAVED], [f"{PP}split_points", "layers.2"], "1F1B does not exist with 2 stages"),
    (pipeline.every_stage_has_a_layer, ranks(8), ranks(9), "more stages than the model's 8 layers; allowed: 1 to 8"),
    (pipeline.every_stage_has_a_layer, [*ranks(4), *INTERLEAVED], [*ranks(5), *INTERLEAVED], "5 ranks × 2 stages per rank"),
    (pipeline.every_stage_has_a_layer, [*ranks(2), *INTERLEAVED, f"{PP}stages_per_rank", "4"], [*ranks(2), *INTERLEAVED, f"{PP}stages_per_rank", "5"], "at most 8 stages"),
    (pipeline.batch_covers_the_microbatches, [f"{PP}microbatches", "3"], [f"{PP}microbatches", "9"], "allowed: 1 to 8, or training.batch_size of 9 or more"),
    (data.dataset_is_known, ["--training.dataset", "allenai/c4:en"], ["--training.dataset", "python_doc"], 'did you mean "python_docs"'),
    (data.dataset_is_known, ["--training.dataset", "wikitext"], ["--validation.enable", "--validation.dataset", "parqet"], 'did you mean "parquet"'),
    (data.dataset_path_is_given_where_needed, ["--training.dataset", "text", "--training.dataset_path", "x"], ["--training.dataset", "text"], "needs training.dataset_path"),
    (data.dataset_path_is_given_where_needed, ["--validation.dataset", "text"], ["--validation.dataset", "text", "--validation.enable"], "needs validation.dataset_path"),
    (data.dataset_path_is_given_where_needed, [], ["--training.dataset_path", "x"], "is read from there"),
    (data.names_of_data_differ, ["--data.sources", sources("a", "b")], ["--data.sources", sources("a", "a")], "has 2 entries of the name a; allowed: a name for each"),
    (data.names_of_data_differ, ["--validation.sets", sources("a", "b")], ["--validation.sets", sources("a", "a")], "has 2 entries of the name a; allowed: a name for each"),
    (data.data_is_named_once, ["--data.sources", sources("a")], ["--data.sources", sources("a"), "--training.dataset", "wikitext"], "says nothing beside data.sources"),
    (data.data_is_named_once, ["--validation.sets", sources("a")], ["--validation.sets", sources("a"), "--validation.dataset", "wikitext"], "says nothing beside validation.sets"),
    (data.tokenizer_path_exists, ["--model.tokenizer_path", __file__], ["--model.tokenizer_path", "/nonexistent.json"], "there is no such file"),
    (data.tokenizer_path_exists, ["--model.tokenizer_path", "byte"], ["--model.tokenizer_path", "bytes"], "did you mean byte"),
    (data.dataset_path_exists, ["--training.dataset", "text", "--training.dataset_path", str(Path(__file__).parent / "*.py")], ["--training.dataset", "text", "--training.dataset_path", "/nonexistent/*.txt"], "no file matches"),
    (data.dataset_path_exists, ["--training.dataset", "text", "--training.dataset_path", str(Path(__file__).parent)], ["--training.dataset", "text", "--training.dataset_path", str(Path(__file__).with_name("test_rule.py"))], "did you mean"),
]  # fmt: skip


def messages(rule: collect.Rule, arguments: list[str] | tuple[str, ...]) -> str:
    loaded = load(arguments)
    return "\n".join(problem.line(loaded.given) for problem in rule(loaded.config, None))


@pytest.mark.parametrize(
    ("rule", "right", "wrong", "says"), CASES, ids=[f"{case[0].__name__}-{n}" for n, case in enumerate(CASES)]
)
def test_a_rule_lets_pass_what_is_right_and_says_what_is_wrong(
    rule: collect.Rule, right: list[str], wrong: list[str], says: str
) -> None:
    assert messages(rule, right) == ""
    assert says in messages(rule, wrong)


def test_every_rule_has_a_case_or_a_test_of_its_own() -> None:
    with_world_size: tuple[Callable[..., object], ...] = (
        training.product_of_degrees_equals_world_size,
        training.global_batch_size_is_a_multiple_of_one_pass,
    )
    tested = {case[0] for case in CASES} | set(with_world_size)
    assert tested == {*collect.RULES, *collect.FILE_RULES}


@pytest.mark.parametrize(
    ("arguments", "world_size"),
    [
        ([], 1),
        ([], 3),
        (ranks(2), 2),
        (ranks(2), 4),
        ([*ranks(2), f"{DP}shard_degree", "2"], 4),
        ([*ranks(2), f"{DP}replicate_degree", "2", f"{DP}shard_degree", "1"], 4),
        ([*ranks(2), f"{DP}replicate_degree", "2"], 8),
    ],
)
def test_degrees_whose_product_is_the_world_size_pass(arguments: list[str], world_size: int) -> None:
    assert rules_broken(*arguments, world_size=world_size) == []


@pytest.mark.parametrize(
    ("arguments", "world_size", "says"),
    [
        (ranks(3), 2, "pipeline_parallel_degree 3 does not divide 2 processes; allowed: 1 or 2; did you mean experimental.pipeline_parallel_degree = 2?"),
        (ranks(3), 4, "allowed: 1 or 2 or 4; did you mean experimental.pipeline_parallel_degree = 2?"),
        (ranks(2), 1, "does not divide 1 process; allowed: 1;"),
        ([f"{DP}replicate_degree", "3"], 4, "data_parallel_replicate_degree 3 does not divide 4 processes"),
        ([f"{DP}shard_degree", "3"], 4, "data_parallel_shard_degree 3, is not the 4 processes there are; allowed: 4;"),
        ([f"{DP}shard_degree", "1"], 2, "did you mean training.data_parallel_shard_degree = 2?"),
        ([*ranks(2), f"{DP}shard_degree", "3"], 4, "pipeline_parallel_degree 2 × data_parallel_shard_degree 3 = 6, is not the 4 processes"),
        ([*ranks(3), f"{DP}replicate_degree", "3"], 4, "start a multiple of 9 processes, or change a degree"),
    ],
)  # fmt: skip
def test_degrees_whose_product_is_not_the_world_size_are_refused_with_what_would_fit(
    arguments: list[str], world_size: int, says: str
) -> None:
    (message,) = rules_broken(*arguments, world_size=world_size)
    assert says in message
    assert rules_broken(*arguments) == []


@pytest.mark.parametrize(
    ("arguments", "world_size"),
    [(["32"], 4), (["8"], 1), (["8", *ranks(2)], 2), (["8"], None), (["9"], None)],
)
def test_a_global_batch_size_of_whole_passes_passes(arguments: list[str], world_size: int | None) -> None:
    assert rules_broken("--training.global_batch_size", *arguments, world_size=world_size) == []


@pytest.mark.parametrize(
    ("arguments", "world_size", "says"),
    [
        (["40"], 4, "is no multiple of the 32 sequences of one pass (batch_size 8 × 4 data-parallel ranks); allowed: multiples of 32; did you mean 32 or 64?"),
        (["10", "--training.batch_size", "1"], 4, "did you mean 8 or 12?"),
        (["4"], 1, "did you mean 8?"),
        (["9", f"{DP}shard_degree", "1"], None, "batch_size 8 × 1 data-parallel rank"),
    ],
)  # fmt: skip
def test_a_global_batch_size_that_would_be_floored_is_refused(
    arguments: list[str], world_size: int | None, says: str
) -> None:
    (message,) = rules_broken("--training.global_batch_size", *arguments, world_size=world_size)
    assert says in message


def test_all_broken_rules_are_reported_at_once() -> None:
    broken = rules_broken(*ranks(3), f"{PP}microbatches", "9", "--training.dataset", "text", world_size=4)
    assert len(broken) == 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--training.warmup_steps", "300"], "does not reach optimizer.lr"),
        (["--training.warmup_steps", "190"], "leaves 10 of the 40 steps"),
        (
            ["--optimizer.state_dtype", "bfloat16", "--optimizer.betas", "[0.9,0.999]"],
            "a mean stays where it is",
        ),
        (["--training.seq_len", "9000"], "beyond the 8192 positions"),
    ],
)
def test_what_is_odd_but_allowed_is_a_notice(arguments: list[str], says: str) -> None:
    (notice,) = load(arguments).notices
    assert says in notice
    assert notices(config_of()) == ()


LAPTOP = Machine(gpus=0, memory=32 << 30, cores=8)
SERVER = Machine(gpus=8, memory=32 << 30, cores=8)
LARGE = Machine(gpus=0, memory=1 << 50, cores=8)


def test_a_model_that_needs_an_accelerator_is_refused_in_one_line_with_what_to_do() -> None:
    (problem,) = machine.machine_suits_the_model(load(["--config", "llama_8b.toml"]), 1, LAPTOP)
    line = problem.line({})
    assert "llama3 8B (8.03 billion parameters) needs an accelerator" in line
    assert "training state is 120 GiB and this machine has 32 GiB" in line
    assert "`stageline plan --config llama_8b.toml`" in line
    assert "without --config the debug model trains" in line


def test_a_step_that_would_take_many_minutes_without_a_gpu_is_refused_too() -> None:
    (problem,) = machine.machine_suits_the_model(load(["--config", "llama_8b.toml"]), 1, LARGE)
    assert "one step on 8 cores would take over" in problem.line({})
    assert "GiB" not in problem.line({})


@pytest.mark.parametrize(
    ("arguments", "where"), [([], LAPTOP), (["--config", "llama_8b.toml"], SERVER), (["--config", "llama_405b.toml"], SERVER)]
)  # fmt: skip
def test_small_models_pass_anywhere_and_large_ones_where_there_are_gpus(
    arguments: list[str], where: Machine
) -> None:
    assert list(machine.machine_suits_the_model(load(arguments), 8, where)) == []


def test_ranks_on_other_hosts_do_not_count_against_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    big = Machine(gpus=0, memory=20 << 30, cores=4096)
    loaded = load(["--config", "llama_8b.toml"])
    assert any(machine.machine_suits_the_model(loaded, 8, big))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert list(machine.machine_suits_the_model(loaded, 8, big)) == []


def test_a_checkpoint_to_go_on_from_must_have_been_saved(tmp_path: Path) -> None:
    arguments = ("--job.dump_folder", str(tmp_path), "--checkpoint.load_step", "5")
    assert "there is no checkpoint of this step" in report_of(*arguments, world_size=1)
    (tmp_path / "checkpoint" / "step-10").mkdir(parents=True)
    assert "allowed: -1 or one of 10" in report_of(*arguments, world_size=1)
    (tmp_path / "checkpoint" / "step-5").mkdir()
    assert report_of(*arguments, world_size=1) == ""


def test_wandb_must_be_installed_if_it_is_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install wandb" in report_of("--metrics.enable_wandb", world_size=1)
    assert report_of(world_size=1) == ""


def test_files_of_data_are_for_training_not_for_planning() -> None:
    assert rules_broken("--model.tokenizer_path", "/nonexistent") == []
    assert "there is no such file" in report_of("--model.tokenizer_path", "/nonexistent", world_size=1)


def test_overlapped_tensor_parallelism_needs_devices_that_have_it() -> None:
    configured = config_of(ASYNC, *tp(2), "--training.compile")
    rule = tensor.async_tensor_parallel_has_a_device_for_it
    (problem,) = rule(configured, Machine(gpus=0, memory=1 << 30, cores=2))
    assert "needs CUDA devices" in problem.message
    assert not list(rule(configured, Machine(gpus=8, memory=1 << 30, cores=2)))
    assert not list(rule(config_of(*tp(2)), Machine(gpus=0, memory=1 << 30, cores=2)))
