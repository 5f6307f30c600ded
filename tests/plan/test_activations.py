"""What a layer keeps for its backward, by arithmetic and by looking."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.activations import Kernels
from models.layers.rope import rotations
from models.layers.sequences import Sequences
from models.llama.model import Transformer, TransformerBlock
from models.llama.sizes import LlamaSizes
from models.registry import family
from models.sizes import Sizes
from parallelisms.checkpointing import apply_activation_checkpointing
from trainer.loss import loss_of_microbatches

DEBUG = family("llama3").sizes["debug"]
NO_GROUPS = LlamaSizes(
    dim=64, n_layers=2, n_heads=4, n_kv_heads=4, ffn_hidden=96, vocab_size=128, max_seq_len=64
)
B, T = 2, 64


class FusedNorm(torch.autograd.Function):
    """Keeps what the fused kernel of accelerators keeps: its input, its weight, and one number per token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
        ctx.save_for_backward(x, weight, scale)
        return (x * scale * weight).type_as(x)


def bytes_kept(function: Any, parameters: list[nn.Parameter]) -> int:
    """Storages that autograd saves, parameters left out."""
    mine = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    kept: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in mine:
            kept[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return sum(size for size, _ in kept.values())


def layer_bytes(sizes: LlamaSizes, dtype: torch.dtype, device: str = "cpu") -> int:
    layer = TransformerBlock(sizes).to(device, dtype)
    x = torch.randn(B, T, sizes.dim, dtype=dtype, device=device, requires_grad=True)
    sequences = Sequences.in_order(T, torch.device(device))
    turns = rotations(sequences.positions, sizes.head_dim, sizes.rope_theta, sizes.rope_scaling)
    return bytes_kept(lambda: layer(x, turns, sequences), list(layer.parameters()))


def predicted(sizes: Sizes, module: str, element: int, kernels: Kernels) -> int:
    saved = sizes.saved(module, element, kernels)
    return saved.whole * B * T + saved.per_sequence * T


@pytest.mark.parametrize("sizes", [DEBUG, NO_GROUPS], ids=["grouped", "not grouped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_on_the_cpu_keeps_exactly_what_is_predicted(sizes: LlamaSizes, dtype: torch.dtype) -> None:
    assert layer_bytes(sizes, dtype) == predicted(sizes, "layers.0", dtype.itemsize, Kernels.CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_with_a_fused_norm_keeps_exactly_what_is_predicted_for_accelerators(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nn.RMSNorm, "forward", lambda norm, x: FusedNorm.apply(x, norm.weight))
    assert layer_bytes(DEBUG, dtype) == predicted(DEBUG, "layers.0", dtype.itemsize, Kernels.ACCELERATOR)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_layer_on_an_accelerator_keeps_what_is_predicted() -> None:
    kept = layer_bytes(DEBUG, torch.bfloat16, "cuda")
    assert kept == pytest.approx(predicted(DEBUG, "layers.0", 2, Kernels.ACCELERATOR), rel=0.1)


def living_tensors() -> list[Tensor]:
    """All that Python knows."""
    gc.collect()
    return [each for each in gc.get_objects() if isinstance(each, Tensor)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_by_operation_a_layer_keeps_exactly_what_is_predicted(dtype: torch.dtype) -> None:
    layer = Transformer(DEBUG, ("layers.0",)).to(dtype)
    apply_activation_checkpointing(layer, "selective", "op")
    x = torch.randn(B, T, DEBUG.dim, dtype=dtype, requires_grad=True)
    before = living_tensors()
    output = layer(x)
    # By identity: a fake tensor that a compiled test has left behind has no storage to look at.
    known = {id(each) for each in before}
    new = [each for each in living_tensors() if id(each) not in known]
    there = {each.untyped_storage().data_ptr() for each in (x, output, *layer.parameters(), *layer.buffers())}
    kept = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in new}
    saved = DEBUG.saved("layers.0", dtype.itemsize, Kernels.CPU)
    assert saved.operations is not None
    positions = 8 * T
    expected = saved.operations * B * T + saved.per_sequence * T
    assert sum(size for place, size in kept.items() if place not in there) - positions == expected


@pytest.mark.parametrize("norm_type", ["layernorm", "np_layernorm"])
def test_other_norms_are_predicted_too(norm_type: str) -> None:
    sizes = LlamaSizes(
        dim=64,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        ffn_hidden=96,
        vocab_size=128,
        max_seq_len=64,
        norm_type=norm_type,  # type: ignore[arg-type]
    )
    assert layer_bytes(sizes, torch.float32) == predicted(sizes, "layers.0", 4, Kernels.CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_output_and_loss_keep_fp32_logits(dtype: torch.dtype) -> None:
    output = nn.Linear(DEBUG.dim, DEBUG.vocab_size, bias=False).to(dtype)
    x = torch.randn(B, T, DEBUG.dim, dtype=dtype, requires_grad=True)
    labels = torch.randint(DEBUG.vocab_size, (B, T))
    loss = loss_of_microbatches([labels], torch.tensor(7))
    kept = bytes_kept(lambda: loss(output(x), 0), list(output.parameters()))
    scalars = 16  # the total weight, and the number of counted tokens
    assert kept - predicted(DEBUG, "output", dtype.itemsize, Kernels.CPU) <= scalars
