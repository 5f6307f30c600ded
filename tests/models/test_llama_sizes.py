"""Sizes as plain arithmetic: published parameter counts, names, operations, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from models import registry
from models.llama.sizes import LlamaSizes
from models.sizes import RopeScaling, SizesError, apply_overrides

PUBLISHED = {
    ("llama2", "7B"): 6_738_415_616,
    ("llama2", "13B"): 13_015_864_320,
    ("llama2", "70B"): 68_976_648_192,
    ("llama3", "8B"): 8_030_261_248,
    ("llama3", "70B"): 70_553_706_496,
    ("llama3.1", "8B"): 8_030_261_248,
    ("llama3.1", "70B"): 70_553_706_496,
    ("llama3.1", "405B"): 405_853_388_800,
    ("llama3.2", "1B"): 1_235_814_400,
    ("llama3.2", "3B"): 3_212_749_824,
    ("llama3.3", "70B"): 70_553_706_496,
}


@pytest.mark.parametrize(("model", "count"), PUBLISHED.items(), ids=lambda value: str(value))
def test_arithmetic_gives_the_published_parameter_count(model: tuple[str, str], count: int) -> None:
    family, flavor = model
    assert registry.family(family).sizes[flavor].parameter_count() == count


def test_the_debug_model_has_about_six_million_parameters_and_eight_layers() -> None:
    sizes = registry.family("llama3").sizes["debug"]
    assert 5e6 < sizes.parameter_count() < 7e6
    assert sizes.n_layers == 8
    assert sizes.max_seq_len >= 2048


def test_modules_partition_the_parameters() -> None:
    sizes = registry.family("llama3").sizes["debug"]
    names = [name for module in sizes.modules() for name in sizes.parameter_shapes(module)]
    assert len(names) == len(set(names)) == 3 + 9 * sizes.n_layers
    assert sum(map(sizes.parameter_count, sizes.modules())) == sizes.parameter_count()


def test_a_module_that_does_not_exist_is_refused_by_name() -> None:
    with pytest.raises(KeyError, match=r"layers\.8"):
        registry.family("llama3").sizes["debug"].parameter_shapes("layers.8")


def test_operations_are_six_per_weight_plus_attention_and_the_sum_of_the_modules() -> None:
    sizes = registry.family("llama3").sizes["8B"]
    weights = sizes.parameter_count() - sizes.parameter_count("tok_embeddings")
    norms = (2 * sizes.n_layers + 1) * sizes.dim
    attention = 12 * sizes.n_layers * sizes.dim * 8192
    assert sizes.flops_per_token(8192) == 6 * (weights - norms) + attention
    assert sum(sizes.flops_per_token(8192, m) for m in sizes.modules()) == sizes.flops_per_token(8192)


def test_a_window_costs_no_more_than_what_is_seen() -> None:
    sizes = registry.family("llama3").sizes["8B"]
    windowed = replace(sizes, sliding_window=1024)
    assert windowed.flops_per_token(512) == sizes.flops_per_token(512)
    assert windowed.flops_per_token(8192) == sizes.flops_per_token(1024)
    assert windowed.parameter_count() == sizes.parameter_count()


def test_a_tied_output_costs_operations_but_no_parameters() -> None:
    tied = registry.family("llama3.2").sizes["1B"]
    untied = replace(tied, tie_embeddings=False)
    assert tied.flops_per_token(2048) == untied.flops_per_token(2048)
    assert untied.parameter_count() - tied.parameter_count() == tied.vocab_size * tied.dim


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dim": 250}, "dim 250 is not divisible by n_heads 8"),
        ({"dim": 24}, "odd"),
        ({"n_kv_heads": 3}, "n_heads 8 is not divisible by n_kv_heads 3"),
        ({"n_layers": 0}, "n_layers must be at least 1, got 0"),
        ({"sliding_window": 0}, "sliding_window must be at least 1, got 0"),
        ({"n_heads": 0}, "n_heads must be at least 1"),
        ({"vocab_size": -1}, "vocab_size must be at least 1"),
        ({"norm_eps": 0.0}, "norm_eps must be above 0"),
        ({"rope_theta": float("nan")}, "rope_theta must be above 0"),
        ({"norm_type": "batchnorm"}, "norm_type must be one of rmsnorm"),
    ],
)
def test_impossible_sizes_are_refused_with_the_reason(change: dict[str, object], reason: str) -> None:
    with pytest.raises(SizesError, match=reason):
        replace(registry.family("llama3").sizes["debug"], **change)


def test_all_problems_of_impossible_sizes_are_reported_at_once() -> None:
    with pytest.raises(SizesError) as caught:
        replace(registry.family("llama3").sizes["debug"], n_layers=0, n_kv_heads=3, vocab_size=0)
    assert len(caught.value.problems) == 3


def test_an_unknown_family_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(registry.UnknownModelError, match=r"'gpt5'.*llama2, llama3"):
        registry.family("gpt5")


def test_every_registered_flavor_has_sizes() -> None:
    llamas = {name for name in registry.names() if name.startswith("llama")}
    assert llamas == {"llama2", "llama3", "llama3.1", "llama3.2", "llama3.3"}
    for name in llamas:
        assert all(isinstance(sizes, LlamaSizes) for sizes in registry.family(name).sizes.values())


def test_neither_the_registry_nor_any_family_imports_torch() -> None:
    code = (
        "import sys; from models import registry\n"
        "counts = [s.parameter_count() for n in registry.names() for s in registry.family(n).sizes.values()]\n"
        "sys.exit('torch' in sys.modules or len(counts) < 12)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_overrides_change_the_named_fields_only() -> None:
    debug = registry.family("llama3").sizes["debug"]
    assert apply_overrides(debug, {}) == debug
    assert apply_overrides(debug, {"n_layers": 4, "dim": None}) == replace(debug, n_layers=4)
    scaled = apply_overrides(debug, {"rope_scaling": {"factor": 32.0}})
    assert scaled.rope_scaling == RopeScaling(factor=32.0)
    assert apply_overrides(scaled, {"rope_scaling": False}) == debug


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ({"layers": 4}, "layers is not among dim, ffn_hidden"),
        ({"n_heads": 7}, "dim 256 is not divisible by n_heads 7"),
        ({"rope_scaling": {"factors": 2.0}}, "rope_scaling.factors is not among factor"),
    ],
)
def test_impossible_overrides_are_refused_with_the_reason(override: dict[str, object], reason: str) -> None:
    with pytest.raises(SizesError, match=reason):
        apply_overrides(registry.family("llama3").sizes["debug"], override)


def test_a_model_table_gives_the_sizes_of_its_flavor_with_norm_and_overrides() -> None:
    debug = registry.family("llama3").sizes["debug"]
    assert registry.configured_sizes("llama3", "debug", "rmsnorm", {}) == debug
    changed = registry.configured_sizes("llama3", "debug", "np_layernorm", {"n_layers": 2})
    assert changed == replace(debug, norm_type="np_layernorm", n_layers=2)
    with pytest.raises(registry.UnknownModelError, match=r"llama3 has no flavor '7B'.*debug, 1B, 8B"):
        registry.configured_sizes("llama3", "7B", "rmsnorm", {})
