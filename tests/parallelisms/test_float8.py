"""Float8 layers, emulated: names and shapes stay, results are near, what is left out is left out."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torchao")

from torch.distributed.device_mesh import init_device_mesh

from models.initialize import initialize_parameters
from models.llama.model import Transformer
from parallelisms.checkpointing import apply_activation_checkpointing
from parallelisms.compile import compile_layers
from parallelisms.data import Precision, shard_data_parallel
from parallelisms.float8 import NoFloat8Error, convert_to_float8
from parallelisms.layout import Float8
from parallelisms.pipeline.deferred import accumulate, defer_weight_gradients
from tests.distributed.ranks import run_ranks
from tests.parallelisms.test_checkpointing import TINY, build, step
from trainer.checkpoint.state import model_tensors

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def float8_model(float8: Float8) -> Transformer:
    model = Transformer(TINY)
    convert_to_float8(model, float8, "cpu", sharded=False)
    initialize_parameters(model, 0)
    return model


@pytest.mark.parametrize("recipe", RECIPES)
def test_loss_and_gradients_are_near_those_without_and_names_the_same(recipe: str) -> None:
    plain, model = build(), float8_model(Float8(recipe, emulate=True))
    expected, actual = step(plain), step(model)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert float(actual["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-3)
    assert actual["loss"] != expected["loss"], "it is not the plain model that ran"
    for name, gradient in expected.items():
        assert float((actual[name] - gradient).norm()) <= 0.2 * float(gradient.norm()), name


def test_what_is_converted_is_what_the_filters_leave_of_the_layers() -> None:
    model = Transformer(TINY)
    left_out = ("attention.wk", "layers.3.", "output")
    converted = convert_to_float8(model, Float8(filters=left_out, emulate=True), "cpu", sharded=False)
    assert {name.split(".", 2)[2] for name in converted} == {
        *("attention.wq", "attention.wv", "attention.wo"),
        *("feed_forward.w1", "feed_forward.w2", "feed_forward.w3"),
    }
    assert {name.split(".")[1] for name in converted} == {"0", "1", "2", "4"}
    small = Float8(filters=("auto_filter_small_kn",), emulate=True)
    assert convert_to_float8(Transformer(TINY), small, "cpu", sharded=False) == ()


def test_a_device_without_float8_is_an_error_that_names_it() -> None:
    with pytest.raises(NoFloat8Error, match="'cpu'"):
        convert_to_float8(Transformer(TINY), Float8(), "cpu", sharded=False)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_split_backward_is_that_of_one_backward(recipe: str) -> None:
    """Float8 layers keep their own backward; the output, which is not converted, waits for the weights' part."""
    float8 = Float8(recipe, emulate=True)
    expected, model = step(float8_model(float8)), float8_model(float8)
    store = defer_weight_gradients(model)
    with store.collect() as pending:
        step(model)
    assert len(pending) == 1
    accumulate(pending)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])


@pytest.mark.parametrize("option", ["op", "1"])
def test_checkpointing_changes_nothing(option: str) -> None:
    float8 = Float8(emulate=True)
    expected, model = step(float8_model(float8)), float8_model(float8)
    apply_activation_checkpointing(model, "selective", option)
    actual = step(model)
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


@pytest.mark.slow
def test_compiled_float8_layers_give_the_same_gradients() -> None:
    torch._dynamo.reset()
    float8 = Float8(emulate=True)
    expected, model = step(float8_model(float8)), float8_model(float8)
    compile_layers(model, "aot_eager")
    actual = step(model)
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-3, atol=1e-6)


def _kept(rank: int) -> tuple[bool, float]:
    model = Transformer(TINY)
    convert_to_float8(model, Float8(gather=True, emulate=True), "cpu", sharded=True)
    mesh = init_device_mesh("cpu", (2,))
    shard_data_parallel(model, mesh, Precision(), reshard_after_forward=True)
    initialize_parameters(model, 0)
    tensors = model_tensors([model])
    plain = all(type(tensor.to_local()) is torch.Tensor for tensor in tensors.values())
    name = "layers.0.attention.wq.weight"
    tensors[name].to_local().fill_(3.0)
    return plain, float(model.get_parameter(name).full_tensor().sum())


def test_a_checkpoint_has_plain_tensors_that_share_memory_with_weights_gathered_in_float8() -> None:
    total = 3.0 * TINY.dim * TINY.dim
    assert run_ranks(_kept, 2) == [(True, total), (True, total)]
