"""Activation checkpointing: a layer keeps its input and computes the rest again in the backward.

Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost (arXiv 1604.06174): one extra forward of each
checkpointed layer buys all of its activations. Applied from outside, before FSDP and before compilation. A
layer's forward is exchanged rather than the layer wrapped in another module, so that parameters keep their
names and checkpoints do not depend on the setting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def apply_activation_checkpointing(module: nn.Module, mode: str, option: str = "2") -> tuple[str, ...]:
    """Checkpoint the layers in `module.layers`, a ModuleDict keyed by their indices in the whole model.

    Args:
        module: the model, or a stage of it.
        mode: "none", "full" for every layer, "selective" for every n-th one.
        option: n, as a decimal number. Layers whose index is a multiple of it are chosen: by index in the whole
            model, so that the choice does not depend on how the model is cut into stages.

    Returns:
        The indices of the checkpointed layers.

    Raises:
        ValueError: there is no such mode, or the option is not a number of at least 1.
    """
    layers = module.layers
    assert isinstance(layers, nn.ModuleDict)
    every = _spacing(mode, option)
    chosen = tuple(name for name in layers if every is not None and int(name) % every == 0)
    for name in chosen:
        layers[name].forward = _Checkpointed(layers[name].forward)
    return chosen


def _spacing(mode: str, option: str) -> int | None:
    match mode:
        case "none":
            return None
        case "full":
            return 1
        case "selective" if option.isdecimal() and int(option) >= 1:
            return int(option)
        case "selective":
            raise ValueError(
                f"selective checkpointing of every n-th layer needs n of at least 1, got {option!r}"
            )
    raise ValueError(f"the modes of activation checkpointing are none, full and selective, got {mode!r}")


class _Checkpointed:
    """A layer's forward under checkpointing. An object and not a closure: it is copied with its layer."""

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        self._forward = forward

    def __call__(self, *inputs: Any) -> Tensor:
        # The layers draw no random numbers, so there is no generator state to bring back.
        return checkpoint(self._forward, *inputs, use_reentrant=False, preserve_rng_state=False)
