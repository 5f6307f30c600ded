"""The tables of rules, and the three checks: of a configuration, for a plan, for training here and now."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from trainer.config.report import Problem, raise_for
from trainer.config.rules import (
    attention,
    blocks,
    checkpoint,
    context,
    data,
    expert,
    machine,
    model,
    pipeline,
    tensor,
    training,
)
from trainer.config.schema import Config

if TYPE_CHECKING:
    from trainer.config.load import Loaded

Rule = Callable[[Config, int | None], Iterable[Problem]]

RULES: tuple[Rule, ...] = (
    model.name_is_a_known_family,
    model.flavor_is_one_of_the_family,
    model.overrides_are_sizes_of_the_family,
    model.sizes_fit_together,
    model.balanced_models_have_experts,
    attention.attention_kernel_spans_context_ranks,
    tensor.tensor_parallel_degree_divides_the_model,
    tensor.tensor_parallel_degree_divides_the_sequence,
    tensor.async_tensor_parallel_is_compiled,
    context.context_parallel_degree_divides_the_sequence,
    context.ulysses_divides_the_heads,
    expert.expert_parallelism_needs_experts,
    expert.expert_parallel_degree_divides_the_experts,
    expert.expert_parallel_degree_divides_the_sharding_ranks,
    expert.spread_experts_are_sharded_evenly,
    training.product_of_degrees_equals_world_size,
    training.global_batch_size_is_a_multiple_of_one_pass,
    training.gradients_are_reduced_no_coarser_than_computed,
    training.parameters_stay_for_a_split_backward,
    blocks.memory_budget_needs_compile,
    blocks.float8_gathers_what_has_one_scale,
    blocks.float8_filters_name_something,
    training.load_step_needs_checkpoints,
    training.seed_checkpoint_needs_checkpoints,
    training.export_dtype_needs_model_weights_only,
    training.files_stay_in_the_run_folder,
    training.rollback_needs_checkpoints,
    training.spike_policy_needs_a_threshold,
    checkpoint.excluded_parts_are_known,
    checkpoint.initial_loading_needs_a_path,
    checkpoint.export_at_the_end_needs_checkpoints,
    checkpoint.exported_model_has_a_form_there,
    pipeline.schedule_is_known,
    pipeline.schedule_file_exists,
    pipeline.stages_are_decided_once,
    pipeline.split_points_are_layers_in_order,
    pipeline.stages_fill_the_ranks_evenly,
    pipeline.stages_per_rank_fit_the_schedule,
    pipeline.every_stage_has_a_layer,
    pipeline.batch_covers_the_microbatches,
    data.dataset_is_known,
    data.dataset_path_is_given_where_needed,
    data.names_of_data_differ,
    data.data_is_named_once,
)
"""Of the configuration alone: the same answer on every machine."""

FILE_RULES: tuple[Rule, ...] = (
    data.tokenizer_path_exists,
    data.dataset_path_exists,
    checkpoint.initial_weights_are_of_the_model,
    checkpoint.folder_can_be_opened,
)
"""Of the files that training reads, which need not be where the plan is made."""

NOTICES: tuple[Callable[[Config], Iterator[str]], ...] = (
    training.warmup_longer_than_the_run,
    training.decay_cut_off_by_the_warmup,
    training.reduced_means_that_stand_still,
    blocks.layers_without_a_weight_part,
    model.sequences_longer_than_the_model_was_made_for,
)


def check(config: Config, world_size: int | None) -> list[Problem]:
    """Everything that is wrong with a configuration for so many processes (None: for any number)."""
    return [problem for rule in RULES for problem in rule(config, world_size)]


def check_files(config: Config) -> list[Problem]:
    """The files that training needs and that are not there."""
    return [problem for rule in FILE_RULES for problem in rule(config, None)]


def check_for_planning(loaded: Loaded, world_size: int | None) -> None:
    """Raise ConfigurationError with every rule that is broken. Files of data need not exist."""
    raise_for(check(loaded.config, world_size), loaded.given, loaded.shown_path)


def check_for_training(loaded: Loaded, world_size: int) -> None:
    """Raise ConfigurationError with everything that keeps `world_size` processes from training on this machine."""
    unsuited = list(machine.machine_suits_the_model(loaded, world_size))
    # Alone: on this machine nothing else about the configuration is worth putting right.
    raise_for(unsuited, loaded.given, loaded.shown_path)
    problems = check(loaded.config, world_size) + check_files(loaded.config)
    problems += blocks.compiler_of_the_machine_is_there(loaded)
    problems += blocks.float8_is_installed_and_possible(loaded)
    problems += attention.attention_kernel_suits_the_device(loaded.config)
    problems += tensor.async_tensor_parallel_has_a_device_for_it(loaded.config)
    problems += [*machine.wandb_is_installed(loaded), *machine.checkpoint_to_load_exists(loaded)]
    problems += machine.torch_places_experts(loaded)
    raise_for(problems, loaded.given, loaded.shown_path)


def notices(config: Config) -> tuple[str, ...]:
    """What is allowed but probably not meant, in sentences."""
    return tuple(sentence for notice in NOTICES for sentence in notice(config))
