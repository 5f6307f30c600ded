"""Activation checkpointing: same results and names, less kept, one extra forward."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from models.initialize import initialize_parameters
from models.llama.model import Transformer
from models.llama.sizes import LlamaSizes
from parallelisms.checkpointing import apply_activation_checkpointing
from parallelisms.pipeline.deferred import accumulate, defer_weight_gradients
from tests.distributed.ranks import run_ranks

TINY = LlamaSizes(dim=32, n_layers=5, n_heads=4, n_kv_heads=2, ffn_hidden=48, vocab_size=61, max_seq_len=64)


def build(mode: str = "none", every: int | str = 2) -> Transformer:
    model = Transformer(TINY)
    apply_activation_checkpointing(model, mode, str(every))
    initialize_parameters(model, 0)
    return model


def step(model: Transformer) -> dict[str, Tensor]:
    x = torch.randint(TINY.vocab_size, (2, 9), generator=torch.Generator().manual_seed(0))
    loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize(
    ("mode", "every"), [("full", 1), ("selective", "2"), ("selective", 3), ("selective", "op")]
)
def test_loss_and_gradients_are_bit_for_bit_those_without(mode: str, every: int) -> None:
    plain, checkpointed = step(build()), step(build(mode, every))
    assert plain.keys() == checkpointed.keys()
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_parameter_names_and_state_are_unchanged(mode: str) -> None:
    model = build(mode)
    assert list(model.state_dict()) == list(build().state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in build().named_parameters()]


@pytest.mark.parametrize(
    ("mode", "every", "chosen"),
    [("none", 1, ()), ("full", 1, (0, 1, 2, 3, 4)), ("selective", 2, (0, 2, 4)), ("selective", 3, (0, 3))],
)
def test_chosen_layers_run_twice_and_the_others_once(mode: str, every: int, chosen: tuple[int, ...]) -> None:
    model = build(mode, every)
    runs: Counter[int] = Counter()
    for name, layer in model.layers.items():
        layer.attention.register_forward_hook(lambda *_, index=int(name): runs.update([index]))
    step(model)
    assert runs == {index: 2 if index in chosen else 1 for index in range(TINY.n_layers)}


def test_the_choice_does_not_depend_on_the_cut_into_stages() -> None:
    whole = apply_activation_checkpointing(Transformer(TINY), "selective", "2")
    names = TINY.modules()
    parts = [Transformer(TINY, names[a:b]) for a, b in ((0, 2), (2, 5), (5, len(names)))]
    chosen = tuple(name for part in parts for name in apply_activation_checkpointing(part, "selective", "2"))
    assert chosen == whole == ("0", "2", "4")


def test_a_checkpointed_layer_keeps_only_its_input() -> None:
    def bytes_kept(model: Transformer) -> int:
        kept: dict[int, int] = {}
        parameters = {p.data_ptr() for p in model.parameters()}

        def pack(x: Tensor) -> Tensor:
            if x.data_ptr() not in parameters:
                kept[x.data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            model(torch.zeros(2, 8, dtype=torch.long)).sum()
        return sum(kept.values())

    assert bytes_kept(build("full")) < 0.25 * bytes_kept(build())
    assert bytes_kept(build("full")) < bytes_kept(build("selective", 2)) < bytes_kept(build())


def test_a_copy_of_the_model_runs_its_own_layers() -> None:
    model = build("full")
    twin = copy.deepcopy(model)
    step(twin)
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in twin.parameters())


class Products(TorchDispatchMode):
    """Counts matrix products and attentions."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.attentions = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += function is torch.ops.aten.mm.default
        self.attentions += function is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return function(*args, **(kwargs or {}))


def test_by_operation_every_second_product_is_computed_again_and_attention_never() -> None:
    with Products() as plain:
        step(build())
    with Products() as by_operation:
        step(build("selective", "op"))
    assert by_operation.products - plain.products == 3 * TINY.n_layers  # of 7 in each layer
    assert by_operation.attentions == plain.attentions == TINY.n_layers


def test_a_split_backward_recomputes_by_operation_once() -> None:
    model = build("selective", "op")
    store = defer_weight_gradients(model)
    with Products() as products:
        with store.collect() as pending:
            step(model)
        accumulate(pending)
    assert products.attentions == TINY.n_layers
    plain = step(build())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, plain[name])


def test_nothing_is_kept_without_gradients() -> None:
    model = build("full")
    with torch.no_grad():
        assert not model(torch.zeros(1, 3, dtype=torch.long)).requires_grad


def _sharded_step(rank: int) -> dict[str, Tensor]:
    model = build("full")
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return {
        name: value if name == "loss" else value.full_tensor()  # type: ignore[attr-defined]
        for name, value in step(model).items()
    }


def test_gradients_under_fsdp_equal_those_of_one_process() -> None:
    plain = step(build())
    for sharded in run_ranks(_sharded_step, 2):
        assert sharded.keys() == plain.keys()
        for name, value in plain.items():
            torch.testing.assert_close(torch.as_tensor(sharded[name]), value, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("mode", "option", "reason"),
    [
        ("selective", "0", "at least 1, got '0'"),
        ("selective", "ops", "got 'ops'"),
        ("some", "2", "got 'some'"),
    ],
)
def test_unknown_modes_and_spacings_are_refused(mode: str, option: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        apply_activation_checkpointing(Transformer(TINY), mode, option)
