"""Context parallelism in training: what the parity matrix does not have, and what a ring is for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallelisms import collectives
from parallelisms.context.gather import gather_backward, gather_forward
from parallelisms.context.ring import ring_backward, ring_forward
from parallelisms.context.span import Group, Span
from parallelisms.context.split import SequenceSplit
from tests.distributed.layouts import CONTIGUOUS, DOCUMENTS, RING, ULYSSES, Trial
from tests.distributed.matrix_run import run_matrix
from tests.distributed.ranks import run_ranks

GQA = (("model.override.n_kv_heads", 1),)

TRIALS = (
    # Recomputation repeats the messages of the forward within the backward of a schedule that splits it.
    Trial(context=2, pipeline=2, schedule="ZBVZeroBubble", microbatches=3, checkpointing="full", more=(*RING, *DOCUMENTS)),
    Trial(context=4, checkpointing="op", accumulation=2, more=(*RING, *CONTIGUOUS, *DOCUMENTS)),
    # One head of keys and values for four ranks.
    Trial(context=4, microbatches=2, more=(*ULYSSES, *DOCUMENTS, *GQA)),
    Trial(context=4, more=(*CONTIGUOUS, *GQA)),
)  # fmt: skip


@pytest.mark.slow
def test_every_method_trains_like_one_process_on_four_ranks(tmp_path: Path) -> None:
    assert {trial.name: found for trial, found in run_matrix(TRIALS, tmp_path).items() if found} == {}


@pytest.mark.parametrize("ring", [True, False])
def test_a_ring_never_holds_the_keys_and_values_of_a_whole_sequence(ring: bool) -> None:
    """The largest tensor that forward and backward make, in tokens of keys and values; gathering makes the whole."""
    length, degree = 128, 4
    largest = max(run_ranks(_largest_tensor, degree, length, ring))
    assert largest == length // degree if ring else largest == length


def _largest_tensor(rank: int, length: int, ring: bool) -> float:
    group = Group(collectives.Group.of(init_device_mesh("cpu", (4,))), SequenceSplit(4))
    span = Span(group, length, 0.5, None, None)
    heads, width = 2, 8
    own = [torch.randn(1, heads, length // 4, width) for _ in range(3)]
    with _Largest() as made:
        whole = (ring_forward if ring else gather_forward)(span, *own)
        (ring_backward if ring else gather_backward)(span, *own, whole, torch.ones_like(own[0]))
    return made.elements / (2 * heads * width)


class _Largest(TorchDispatchMode):
    """The number of elements in the largest tensor that any operation gives."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result
