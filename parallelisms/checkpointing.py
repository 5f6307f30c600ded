"""Activation checkpointing: a layer keeps its input and computes the rest again in the backward.

Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost (arXiv 1604.06174): one extra forward of each
checkpointed layer buys all of its activations. Applied from outside, before FSDP and before compilation. A
layer's forward is exchanged rather than the layer wrapped in another module, so that parameters keep their
names and checkpoints do not depend on the setting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Mode = Literal["none", "full", "selective"]


def apply_activation_checkpointing(module: nn.Module, mode: Mode, every: int = 1) -> tuple[str, ...]:
    """Checkpoint the layers in `module.layers`, a ModuleDict keyed by their indices in the whole model.

    Args:
        module: the model, or a stage of it.
        mode: "none", "full" for every layer, "selective" for every `every`-th one.
        every: layers whose index is a multiple of it are chosen; by index in the whole model, so that the
            choice does not depend on how the model is cut into stages.

    Returns:
        The indices of the checkpointed layers.

    Raises:
        ValueError: `every` is below 1.
    """
    if every < 1:
        raise ValueError(f"every must be at least 1, got {every}")
    layers = module.layers
    assert isinstance(layers, nn.ModuleDict)
    step = {"none": None, "full": 1, "selective": every}[mode]
    chosen = tuple(name for name in layers if step is not None and int(name) % step == 0)
    for name in chosen:
        layers[name].forward = _Checkpointed(layers[name].forward)
    return chosen


class _Checkpointed:
    """A layer's forward under checkpointing. An object and not a closure: it is copied with its layer."""

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        self._forward = forward

    def __call__(self, *inputs: Any) -> Tensor:
        # The layers draw no random numbers, so there is no generator state to bring back.
        return checkpoint(self._forward, *inputs, use_reentrant=False, preserve_rng_state=False)
