"""Bytes of a rank's training state: parameters, gradients, optimizer; and how FSDP groups parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from models.sizes import Sizes
from models.tied import held_shapes
from parallelisms.expert_plan import is_of_experts
from parallelisms.layout import Layout
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
class Cut:
    """How a parameter is divided: a rank computes with a tensor of this shape, which `ranks` ranks share as FSDP
    shards it: along the first dimension, or if `even` along one that they divide."""

    shape: tuple[int, ...]
    ranks: int
    even: bool = False

    @property
    def whole(self) -> int:
        """Numbers that a rank computes with."""
        return math.prod(self.shape)

    @property
    def share(self) -> int:
        """Numbers that a rank keeps, rows rounded up to be equal on all."""
        if self.even:
            return self.whole // self.ranks
        first, *others = self.shape
        return -(-first // self.ranks) * math.prod(others)


@dataclass(frozen=True)
class ParameterGroup:
    """What FSDP gathers and reduces at once: the parameters of one layer, or all that are in no layer.

    Attributes:
        whole: numbers in it.
        share: numbers of it on each rank.
        sent: numbers that a rank gives to others when it is gathered once.
        tensors: how many parameters it has.
        largest: numbers in the largest of them.
        matrices, matrices_share: the same of those that are matrices, or stacks of them.
    """

    whole: int
    share: int
    sent: int
    tensors: int
    largest: int
    matrices: int
    matrices_share: int

    @classmethod
    def of(cls, cuts: Sequence[Cut]) -> ParameterGroup:
        matrices = [cut.share for cut in cuts if len(cut.shape) >= 2]
        return cls(
            whole=sum(cut.whole for cut in cuts),
            share=sum(cut.share for cut in cuts),
            sent=sum((cut.ranks - 1) * cut.share for cut in cuts),
            tensors=len(cuts),
            largest=max((cut.whole for cut in cuts), default=0),
            matrices=len(matrices),
            matrices_share=sum(matrices),
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
    def sent(self) -> int:
        return sum(group.sent for group in self.groups)

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
        cls, sizes: Sizes, modules: Sequence[str], layout: Layout, moments: Moments = Moments()
    ) -> StageParameters:
        """Of a stage of these modules."""
        layers = [name for name in modules if is_layer(name)]
        others = [name for name in modules if not is_layer(name)]
        # Layers of one shape are one object: a large model has hundreds of them.
        groups: dict[tuple[Cut, ...], ParameterGroup] = {}
        found = []
        for name in layers:
            cuts = cuts_of(sizes, sizes.parameter_shapes(name), layout)
            if cuts not in groups:
                groups[cuts] = ParameterGroup.of(cuts)
            found.append(groups[cuts])
        rest = cuts_of(sizes, held_shapes(sizes, others), layout)
        return cls(tuple(found), ParameterGroup.of(rest), moments)


def cuts_of(sizes: Sizes, shapes: Mapping[str, tuple[int, ...]], layout: Layout) -> tuple[Cut, ...]:
    """How the parameters of these names and shapes are divided."""
    heads = kv_heads(sizes)
    return tuple(
        _cut(name, local_shape(name, shape, layout.tensor, heads), layout) for name, shape in shapes.items()
    )


def _cut(name: str, shape: tuple[int, ...], layout: Layout) -> Cut:
    """`shape` is what a rank of a tensor group has; of stacked experts it may have some only."""
    if layout.expert == 1 or not is_of_experts(name):
        return Cut(shape, layout.sharding_ranks)
    experts, *others = shape
    return Cut((experts // layout.expert, *others), layout.sharding_ranks // layout.expert, even=True)


def state_bytes(stages: Sequence[StageParameters]) -> StateBytes:
    """State of the fullest rank that owns these stages: the first of its shard ranks."""
    parts = [stage.state for stage in stages]
    return StateBytes(
        sum(part.parameters for part in parts),
        sum(part.gradients for part in parts),
        sum(part.optimizer for part in parts),
    )
