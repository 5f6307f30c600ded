"""torch.compile for each layer of a stage.

Layers are alike, so the compiler works once for all of them, and what is around them (the embedding, the output,
the hooks of FSDP) stays as it is. A layer's forward is exchanged, as for checkpointing: parameters keep their
names, and FSDP gathers and releases outside of what is compiled. To be applied after checkpointing, which then is
part of the graph, and before FSDP.

A compiled layer computes its weight gradients together with that of its input: its backward is one graph. Split
backward stays correct, but the weight part has nothing left to do for these layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from parallelisms.parts import parts_taken


def compile_layers(module: nn.Module, backend: str = "inductor") -> None:
    """Compile every layer in `module.layers`, at its first use.

    Microbatches of unequal numbers of sequences and validation do not compile for ever: the second size that is
    met makes the graph one of any size. Operations that cannot be traced, such as reading how many tokens an expert
    has, cut the graph in two instead of failing.
    """
    layers = module.layers
    assert isinstance(layers, nn.ModuleDict)
    for layer in layers.values():
        layer.forward = _Compiled(layer, backend)


class _Compiled:
    """A layer's forward, compiled at its first use."""

    def __init__(self, layer: nn.Module, backend: str) -> None:
        self._layer = layer
        self._forward: Callable[..., Tensor] = torch.compile(layer.forward, backend=backend)

    def __call__(self, x: Tensor, *others: Any) -> Tensor:
        # (B, T, D). There are two lengths at most, those of training and of validation; of any length, attention
        # could not be traced.
        torch._dynamo.mark_static(x, 1)
        with parts_taken(self._layer):
            return self._forward(x, *others)
