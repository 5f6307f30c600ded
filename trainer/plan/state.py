"""Bytes of a rank's training state: parameters, gradients, optimizer; and how FSDP groups parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from models.sizes import Sizes
from models.tied import held_shapes
from parallelisms.pipeline.split import is_layer
from parallelisms.tensor_plan import kv_heads, local_shape
from trainer.plan.formats import STATE_BYTES


@dataclass(frozen=True)
class StateBytes:
    """Bytes that a rank keeps for its stages through the whole run."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True)
class Moments:
    """What the optimizer keeps: `bytes` of a running mean of one number; two of them, or with `muon` one of the
    numbers in the matrices of layers."""

    bytes: int = STATE_BYTES
    muon: bool = False

    def of(self, layers: Sequence[ParameterGroup], rest: ParameterGroup) -> int:
        """Bytes on a rank. Adam also counts its steps, once for each parameter."""
        means = 2 * (rest.share + sum(group.share for group in layers))
        counts = rest.tensors + sum(group.tensors for group in layers)
        if self.muon:
            means -= sum(group.matrices_share for group in layers)
            counts -= sum(group.matrices for group in layers)
        return means * self.bytes + counts * STATE_BYTES


@dataclass(frozen=True)
class ParameterGroup:
    """What FSDP gathers and reduces at once: the parameters of one layer, or all that are in no layer.

    Attributes:
        whole: numbers in it.
        share: numbers of it on each of the shard ranks, rows rounded up to be equal on all.
        tensors: how many parameters it has.
        largest: numbers in the largest of them.
        matrices, matrices_share: the same of those that are matrices, or stacks of them.
    """

    whole: int
    share: int
    tensors: int
    largest: int
    matrices: int
    matrices_share: int

    @classmethod
    def of(cls, shapes: Iterable[tuple[int, ...]], shard: int) -> ParameterGroup:
        """Parameters are cut along their first dimension."""
        listed = list(shapes)
        wholes = [math.prod(shape) for shape in listed]
        shares = [-(-shape[0] // shard) * math.prod(shape[1:]) for shape in listed]
        matrices = [share for shape, share in zip(listed, shares, strict=True) if len(shape) >= 2]
        return cls(
            sum(wholes),
            sum(shares),
            len(listed),
            max(wholes, default=0),
            len(matrices),
            sum(matrices),
        )


@dataclass(frozen=True)
class StageParameters:
    """The parameters of one stage as FSDP groups them; `rest` are those in no layer."""

    layers: tuple[ParameterGroup, ...]
    rest: ParameterGroup
    moments: Moments = Moments()

    @property
    def groups(self) -> tuple[ParameterGroup, ...]:
        return (*self.layers, self.rest)

    @property
    def whole(self) -> int:
        return sum(group.whole for group in self.groups)

    @property
    def share(self) -> int:
        return sum(group.share for group in self.groups)

    @property
    def tensors(self) -> int:
        return sum(group.tensors for group in self.groups)

    @property
    def state(self) -> StateBytes:
        """What the fullest of its shard ranks keeps.

        Parameters and gradients are in fp32, and with what the optimizer keeps divided among the shard ranks.
        """
        kept = self.moments.of(self.layers, self.rest)
        return StateBytes(self.share * STATE_BYTES, self.share * STATE_BYTES, kept)

    @property
    def largest_layer(self) -> int:
        """Numbers in the largest layer."""
        return max((group.whole for group in self.layers), default=0)

    @classmethod
    def of(
        cls,
        sizes: Sizes,
        modules: Sequence[str],
        shard: int,
        moments: Moments = Moments(),
        tensor: int = 1,
    ) -> StageParameters:
        """Of a stage of these modules; "whole" is what one of the `tensor` ranks of a group has."""
        layers = [name for name in modules if is_layer(name)]
        others = [name for name in modules if not is_layer(name)]
        # Layers of one shape are one object: a large model has hundreds of them.
        groups: dict[tuple[tuple[int, ...], ...], ParameterGroup] = {}
        found = []
        for name in layers:
            shapes = local_shapes(sizes, sizes.parameter_shapes(name), tensor)
            if shapes not in groups:
                groups[shapes] = ParameterGroup.of(shapes, shard)
            found.append(groups[shapes])
        rest = local_shapes(sizes, held_shapes(sizes, others), tensor)
        return cls(tuple(found), ParameterGroup.of(rest, shard), moments)


def local_shapes(
    sizes: Sizes, shapes: Mapping[str, tuple[int, ...]], tensor: int
) -> tuple[tuple[int, ...], ...]:
    """What each of `tensor` ranks has of the parameters of these names and shapes."""
    heads = kv_heads(sizes)
    return tuple(local_shape(name, shape, tensor, heads) for name, shape in shapes.items())


def state_bytes(stages: Sequence[StageParameters]) -> StateBytes:
    """State of the fullest rank that owns these stages: the first of its shard ranks."""
    parts = [stage.state for stage in stages]
    return StateBytes(
        sum(part.parameters for part in parts),
        sum(part.gradients for part in parts),
        sum(part.optimizer for part in parts),
    )
