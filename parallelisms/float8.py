"""Matrix products of the layers in 8-bit floating point, by torchao: operands are scaled and rounded at each use.

Micikevicius et al. 2022, FP8 Formats for Deep Learning (arXiv 2209.05433). Scales are dynamic: from the largest
absolute value of what is multiplied, now; with "tensorwise" one for a whole operand, with "rowwise" one for each row.
"rowwise_with_gw_hp" leaves the products for the weight gradients in high precision.

The linear layers in `module.layers` are exchanged for torchao's, under the same names and with the same parameters;
embedding, output and routers stay. To be applied first, so that tensor parallelism cuts what is there. Under tensor
parallelism each rank scales its own part of an operand: finer than one scale for the whole.

A converted layer computes its weight gradient together with that of its input, also where the backward is split.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallelisms.layout import Float8

_FIRST_CAPABILITY = (8, 9)  # Ada and Hopper
_MULTIPLE = 16  # of both sizes of a matrix, which the kernels need
AUTOMATIC = "auto_filter_small_kn"
"""In place of a name: leave out matrices that are too small to be faster in float8."""


class NoFloat8Error(RuntimeError):
    """The device has no products in float8."""


@dataclass(frozen=True)
class _Chosen:
    """Which modules are converted."""

    left_out: tuple[str, ...]
    large_enough: Callable[[nn.Module, str], bool] | None

    def __call__(self, module: nn.Module, name: str) -> bool:
        if not isinstance(module, nn.Linear) or not name.startswith("layers."):
            return False
        if any(part in name for part in self.left_out):
            return False
        if module.in_features % _MULTIPLE or module.out_features % _MULTIPLE:
            return False
        return self.large_enough is None or self.large_enough(module, name)


def convert_to_float8(
    module: nn.Module, float8: Float8, device_type: str, *, sharded: bool
) -> tuple[str, ...]:
    """Convert the layers of a stage's untouched module, in place; returns the names of what was converted.

    Args:
        module: the model, or a stage of it.
        float8: how.
        device_type: on which it will compute.
        sharded: whether FSDP shards it over several ranks; only then is there something to gather in float8.

    Raises:
        NoFloat8Error: the device cannot, and emulation is not asked for.
    """
    # It says of every kernel that was not built for this machine that it cannot be loaded. None of them is used here.
    logging.getLogger("torchao").setLevel(logging.ERROR)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    if not float8.emulate:
        _check_device(device_type)
    config = replace(
        Float8LinearConfig.from_recipe_name(float8.recipe),
        emulate=float8.emulate,
        enable_fsdp_float8_all_gather=float8.gather and sharded,
    )
    convert_to_float8_training(module, config=config, module_filter_fn=_chosen(float8))
    return tuple(name for name, child in module.named_modules() if isinstance(child, Float8Linear))


def precompute_scales(modules: Iterable[nn.Module]) -> None:
    """Work out the scales of all weights that are gathered in float8 at once, instead of one by one when they are.

    To be called after each update. Collective over the ranks that shard the modules.
    """
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    for module in modules:
        if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            precompute_float8_dynamic_scale_for_fsdp(module)


def without_float8(tensor: Tensor) -> Tensor:
    """The tensor itself, in the format in which it is kept, of a weight that is gathered in float8; others as they are.

    It shares memory with the weight. torchao wraps such weights, and a checkpoint must not depend on that.
    """
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    inner = getattr(local, "_tensor", None)
    if not isinstance(inner, Tensor):
        return tensor
    if not isinstance(tensor, DTensor):
        return inner
    return DTensor.from_local(
        inner,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def _chosen(float8: Float8) -> _Chosen:
    from torchao.float8 import _auto_filter_for_recipe

    left_out = tuple(name for name in float8.filters if name != AUTOMATIC)
    large_enough = None
    if AUTOMATIC in float8.filters:
        large_enough = partial(_auto_filter_for_recipe(float8.recipe, filter_fqns=[]))
    return _Chosen(left_out, large_enough)


def _check_device(device_type: str) -> None:
    if device_type != "cuda":
        raise NoFloat8Error(f"a device of type {device_type!r} has no matrix products in float8")
    capability = torch.cuda.get_device_capability()
    if torch.version.cuda is not None and capability < _FIRST_CAPABILITY:
        raise NoFloat8Error(
            f"{torch.cuda.get_device_name()} (compute capability {capability[0]}.{capability[1]}) has no matrix "
            f"products in float8; devices from {_FIRST_CAPABILITY[0]}.{_FIRST_CAPABILITY[1]} on have them"
        )
