"""Compiled layers: the same gradients and names, compiled once for all layers and for few shapes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.utils import counters

from models.llama.model import Transformer
from parallelisms.checkpointing import apply_activation_checkpointing
from parallelisms.compile import compile_layers
from tests.parallelisms.test_checkpointing import TINY, build, step


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with torch._functorch.config.patch(activation_memory_budget=1.0):
        yield


def compiled(mode: str = "none", every: int | str = 2) -> Transformer:
    model = build(mode, every)
    compile_layers(model, "aot_eager")
    return model


@pytest.mark.parametrize(("mode", "every"), [("none", 2), ("full", 1), ("selective", "op")])
def test_compiled_layers_give_the_same_gradients(mode: str, every: int | str) -> None:
    model = compiled(mode, every)
    assert list(model.state_dict()) == list(build().state_dict())
    plain, actual = step(build()), step(model)
    assert actual.keys() == plain.keys()
    for name in plain:
        torch.testing.assert_close(actual[name], plain[name], rtol=1e-3, atol=1e-6)
    assert counters["stats"]["unique_graphs"] == 1, "one graph for all layers"


@pytest.mark.slow
def test_the_number_of_graphs_does_not_grow_with_the_shapes_that_are_met() -> None:
    model = compiled()
    for rows in (5, 4, 3, 2, 6, 7):
        model(torch.zeros(rows, 9, dtype=torch.long)).sum().backward()
    for rows in (8, 3, 2, 5, 6):
        with torch.no_grad():
            model(torch.zeros(rows, 12, dtype=torch.long))
    # Training: the first number of sequences, and any number. Validation, which is longer: any number.
    assert counters["stats"]["unique_graphs"] <= 3
    assert not counters["graph_break"]


@pytest.mark.slow
def test_a_memory_budget_decides_what_compiled_layers_keep() -> None:
    def bytes_kept(budget: float) -> int:
        torch._dynamo.reset()
        model = Transformer(TINY)
        assert apply_activation_checkpointing(model, "memory_budget", budget=budget) == ()
        compile_layers(model, "aot_eager")
        kept: dict[int, int] = {}
        parameters = {p.data_ptr() for p in model.parameters()}

        def pack(x: torch.Tensor) -> torch.Tensor:
            if x.data_ptr() not in parameters:
                kept[x.data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            model(torch.zeros(2, 8, dtype=torch.long)).sum()
        return sum(kept.values())

    assert bytes_kept(0.0) < 0.5 * bytes_kept(1.0)
    assert bytes_kept(0.0) <= bytes_kept(0.5) <= bytes_kept(1.0)
