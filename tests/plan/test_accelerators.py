"""The table of accelerators and how long a step takes on them."""

from __future__ import annotations

import pytest

from parallelisms.layout import Layout
from tests.plan.configs import config
from trainer.errors import ConfigurationError
from trainer.flops import peak_flops_of
from trainer.plan.accelerators import ACCELERATORS, find_accelerator
from trainer.plan.nodes import place_in_nodes
from trainer.plan.plan import make_plan
from trainer.plan.speed import bandwidths, estimate_step


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("H100", "H100-SXM"),
        ("h100 pcie", "H100-PCIe"),
        ("A100", "A100-80"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("mi300x", "MI300X"),
        ("AMD MI300X", "MI300X"),
        ("cpu", "CPU"),
    ],
)
def test_names_are_found_in_many_spellings(name: str, found: str) -> None:
    assert find_accelerator(name).name == found


def test_an_unknown_accelerator_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match=r"--accelerator H1000: .*did you mean H100-SXM\?") as error:
        find_accelerator("H1000")
    assert all(each.name in str(error.value) for each in ACCELERATORS)


def test_no_two_accelerators_share_a_name() -> None:
    names = [name for each in ACCELERATORS for name in (each.name, *each.aliases)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("A100-40", "NVIDIA A100-SXM4-40GB"),
        ("A100-80", "NVIDIA A100-SXM4-80GB"),
        ("H100-SXM", "NVIDIA H100 80GB HBM3"),
        ("H100-PCIe", "NVIDIA H100 PCIe"),
        ("H200", "NVIDIA H200"),
        ("B200", "NVIDIA B200"),
        ("MI300X", "AMD Instinct MI300X"),
        ("L40S", "NVIDIA L40S"),
        ("A10", "NVIDIA A10"),
    ],
)
def test_plan_and_run_measure_utilisation_against_the_same_peak(name: str, device: str) -> None:
    assert find_accelerator(name).peak_flops == peak_flops_of(device)


def test_nothing_is_guessed_of_what_is_not_known() -> None:
    cpu = find_accelerator("CPU")
    plan = make_plan(config(), 1)
    assert estimate_step(plan, cpu, place_in_nodes(plan.layout, 8)) is None
    # The peak in the table is that of bf16.
    full = make_plan(config(training={"mixed_precision_param": "float32"}), 1)
    assert estimate_step(full, find_accelerator("H100"), place_in_nodes(full.layout, 8)) is None


def test_a_ring_over_nodes_is_as_fast_as_the_cards_of_the_ranks_in_a_node() -> None:
    h100 = find_accelerator("H100")
    inside = bandwidths(h100, place_in_nodes(Layout(shard=8), 8))
    across = bandwidths(h100, place_in_nodes(Layout(replicate=2, shard=64), 8))
    assert inside is not None
    assert across is not None
    assert inside.shard == h100.intra_node_bandwidth
    assert across.shard == 8 * 50e9
    assert across.replicate == 50e9


def test_the_utilisation_is_what_efficiency_bubble_and_recomputation_leave() -> None:
    h100 = find_accelerator("H100")
    training = {"batch_size": 1, "seq_len": 8192}
    plain = make_plan(config("8B", training=training), 8)
    again = make_plan(config("8B", training=training, activation_checkpoint={"mode": "full"}), 8)
    nodes = place_in_nodes(plain.layout, 8)
    fast, slow = estimate_step(plain, h100, nodes), estimate_step(again, h100, nodes)
    assert fast is not None
    assert slow is not None
    assert 0.45 < fast.mfu <= 0.5  # nearly all communication hides
    assert slow.mfu == pytest.approx(fast.mfu * again.mfu_ceiling, rel=0.05)
    assert fast.tokens_per_second == pytest.approx(plain.tokens_per_step / fast.seconds)


def test_a_slow_network_shows_where_nothing_hides_it() -> None:
    plan = make_plan(config("8B", training={"batch_size": 1, "seq_len": 512}), 64)
    h100, a10 = find_accelerator("H100"), find_accelerator("A10")
    for accelerator in (h100, a10):
        inside = estimate_step(plan, accelerator, place_in_nodes(plan.layout, 64))
        across = estimate_step(plan, accelerator, place_in_nodes(plan.layout, 1))
        assert inside is not None
        assert across is not None
        assert across.exposed > inside.exposed > 0
