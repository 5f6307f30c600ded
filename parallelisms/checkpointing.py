"""Activation checkpointing: a layer keeps its input and computes the rest again in the backward.

Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost (arXiv 1604.06174): one extra forward of each
checkpointed layer buys all of its activations. Applied from outside, before compilation and FSDP. A layer's
forward is exchanged rather than the layer wrapped in another module, so that parameters keep their names and
checkpoints do not depend on the setting.

Selective by operation keeps the results of what is dear to compute again, attention and every second matrix
product, and recomputes the cheap rest (Korthikanti et al. 2022, arXiv 2205.05198, section 5, is the idea; the choice
of operations is torchtitan's). By memory budget, the compiler decides: it solves for the cheapest recomputation whose
kept tensors fit the budget.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.nn.attention.varlen
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import parallelisms.context.operators  # noqa: F401  (so that torch knows its operation)

MODES = ("none", "full", "selective", "memory_budget")


def apply_activation_checkpointing(
    module: nn.Module, mode: str, option: str = "2", budget: float = 0.5
) -> tuple[str, ...]:
    """Checkpoint the layers in `module.layers`, a ModuleDict keyed by their indices in the whole model.

    Args:
        module: the model, or a stage of it.
        mode: "none"; "full" for every layer; "selective" for every n-th one, or for some operations of every
            layer; "memory_budget" for what the compiler chooses, in every layer that is compiled afterwards.
        option: with "selective": n, as a decimal number, or "op". Layers whose index is a multiple of n are
            chosen: by index in the whole model, so that the choice does not depend on how the model is cut.
        budget: with "memory_budget": the share of the activations of compiled layers that may be kept; 0 keeps
            their inputs only, 1 all that the fastest backward wants.

    Returns:
        The indices of the layers whose forward is checkpointed.

    Raises:
        ValueError: there is no such mode, or the option is not a number of at least 1.
    """
    layers = module.layers
    assert isinstance(layers, nn.ModuleDict)
    if mode == "memory_budget":
        # The partitioner reads it when a layer is compiled, at its first use: it is a setting of the process.
        torch._functorch.config.activation_memory_budget = budget
        return ()
    by_operation = mode == "selective" and option == "op"
    every = 1 if by_operation else _spacing(mode, option)
    chosen = tuple(name for name in layers if every is not None and int(name) % every == 0)
    for name in chosen:
        layers[name].forward = _Checkpointed(layers[name].forward, by_operation)
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
    raise ValueError(f"the modes of activation checkpointing are {', '.join(MODES)}, got {mode!r}")


class _Checkpointed:
    """A layer's forward under checkpointing. An object and not a closure: it is copied with its layer."""

    def __init__(self, forward: Callable[..., Tensor], by_operation: bool) -> None:
        self._forward = forward
        self._by_operation = by_operation

    def __call__(self, *inputs: Any) -> Tensor:
        # The layers draw no random numbers, so there is no generator state to bring back.
        if self._by_operation:
            return checkpoint(
                self._forward,
                *inputs,
                use_reentrant=False,
                preserve_rng_state=False,
                context_fn=_selective_contexts,
            )
        return checkpoint(self._forward, *inputs, use_reentrant=False, preserve_rng_state=False)


def _selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of one forward and of its recomputation; each counts its matrix products from the start."""
    return create_selective_checkpoint_contexts(partial(_policy, {"forward": 0, "recompute": 0}))


def _policy(products: dict[str, int], context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    """Keep the result of an operation, or compute it again."""
    if operation in _MATRIX_PRODUCTS:
        phase = "recompute" if context.is_recompute else "forward"
        products[phase] += 1
        keep = products[phase] % 2 == 1
    else:
        keep = operation in _KEPT
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


_ATEN = torch.ops.aten
_MATRIX_PRODUCTS = frozenset({_ATEN.mm.default, _ATEN.addmm.default, _ATEN._scaled_mm.default})
# Attention, whose cost grows with the square of the sequence; what other ranks had to send, which would be asked of
# them again; and the largest absolute values that float8 scales by.
_KEPT = frozenset(
    {
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_cudnn_attention.default,
        _ATEN._scaled_dot_product_attention_math.default,
        _ATEN._scaled_dot_product_fused_attention_overrideable.default,
        _ATEN.max.default,
        torch.ops.stageline.attend_across_ranks.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
        torch.ops._c10d_functional.all_to_all_single.default,
        torch.ops.higher_order.flex_attention,
        torch.ops.torch_attn._varlen_attn.default,
    }
)
