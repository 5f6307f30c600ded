"""Context parallelism applied to an untouched module: the forward of its attention spans the context group."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

# Torch's own functional collectives: out of place, and known to the compiler. They need this import.
from torch.distributed import _functional_collectives as _  # noqa: F401
from torch.distributed.device_mesh import DeviceMesh

from models.layers.attend import Attend
from models.layers.attention_kernels import Mask
from models.layers.router import Router
from models.layers.sequences import Sequences
from parallelisms import collectives
from parallelisms.context.cut import CutSequences
from parallelisms.context.heads import attend_by_heads
from parallelisms.context.operators import attend_across_ranks
from parallelisms.context.span import Group, Span
from parallelisms.context.split import SequenceSplit
from parallelisms.layout import RotateMethod

_ops = torch.ops._c10d_functional


def apply_context_parallelism(
    module: nn.Module, mesh: DeviceMesh, split: SequenceSplit, method: RotateMethod
) -> None:
    """Let every `Attend` in `module` attend over the tokens of all ranks of `mesh`, which has one dimension.

    Everything else in a decoder works on each token alone, but for the balance loss of a layer of experts, which
    counts the tokens of whole sequences. From then on the module is given the rank's part of every sequence, cut
    by `parallelisms.context.cut` in the same split. The forward is exchanged and nothing is wrapped, so that
    parameters keep their names.
    """
    group = Group(collectives.Group.of(mesh), split)
    for child in module.modules():
        if isinstance(child, Attend):
            spanning = SpanningAttention(child, group, method)
            child.forward = spanning  # type: ignore[method-assign]
            child.mask = spanning.mask  # type: ignore[method-assign]
        elif isinstance(child, Router):
            child.sum_over_sequence = _SumOverRanks(group.collective.name)


class _SumOverRanks:
    """Adds up what the ranks of a group counted in their parts of the same sequences."""

    def __init__(self, group: str) -> None:
        self._group = group

    def __call__(self, counts: Tensor) -> Tensor:
        total: Tensor = _ops.wait_tensor(_ops.all_reduce(counts, "sum", self._group))
        return total


class SpanningAttention:
    """The forward of an `Attend` whose keys are divided among the ranks of a group. Collective over the group."""

    def __init__(self, attend: Attend, group: Group, method: RotateMethod) -> None:
        self._scale = attend.scale
        self._window = attend.window
        self._alone: Callable[..., Tensor] = attend.forward
        self._mask_alone: Callable[..., Mask] = attend.mask
        self._group = group
        self._method = method

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> Tensor:
        """As `Attend.forward`, of this rank's queries, keys and values of sequences that `SequenceCut` cut."""
        assert isinstance(sequences, CutSequences), "the sequences were not cut for context parallelism"
        scale = q.shape[-1] ** -0.5 if self._scale is None else self._scale
        length = q.shape[2] * self._group.size
        span = Span(self._group, length, scale, self._window, sequences.whole_documents)
        if self._method == "ulysses":
            masks = sequences.masks
            if masks is None:
                rows, _, part, _ = q.shape
                masks = {self._window: self.mask(sequences, rows, part, part, q.dtype)}
            return attend_by_heads(span, self._alone, q, k, v, masks)
        return attend_across_ranks(span, q, k, v, ring=self._method == "alltoall")

    def mask(self, sequences: Sequences, rows: int, queries: int, keys: int, dtype: torch.dtype) -> Mask:
        """As `Attend.mask`: by heads, that of whole sequences; otherwise parts of sequences have masks of their own."""
        if self._method != "ulysses":
            return None
        assert isinstance(sequences, CutSequences), "the sequences were not cut for context parallelism"
        length = queries * self._group.size
        places = torch.arange(length, device=sequences.positions.device)
        whole = Sequences(places, sequences.whole_documents)
        return self._mask_alone(whole, rows, length, length, dtype)
