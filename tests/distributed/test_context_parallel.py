"""Context parallelism in training: what the parity matrix does not have, and what a ring is for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.layers.attend import Attend
from models.layers.sequences import Sequences
from parallelisms.context.apply import apply_context_parallelism
from parallelisms.context.cut import SequenceCut
from parallelisms.context.split import SequenceSplit
from parallelisms.layout import RotateMethod
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


@pytest.mark.parametrize(("method", "holds_all"), [("allgather", True), ("alltoall", False)])
def test_a_ring_never_holds_the_keys_and_values_of_a_whole_sequence(
    method: RotateMethod, holds_all: bool
) -> None:
    """The largest tensor that forward and backward make, in tokens of keys and values."""
    length, degree = 128, 4
    for largest in run_ranks(_largest_tensor, degree, length, method):
        if holds_all:
            assert largest >= length
        else:
            assert largest <= length // degree


def _largest_tensor(rank: int, length: int, method: RotateMethod) -> float:
    mesh = init_device_mesh("cpu", (4,))
    cut = SequenceCut(SequenceSplit(4), rank)
    attention = nn.ModuleList([Attend()])
    apply_context_parallelism(attention, mesh, cut.split, method)
    heads, width = 2, 8
    own = [torch.randn(1, heads, length // 4, width, requires_grad=True) for _ in range(3)]
    sequences = cut.sequences(Sequences.in_order(length, torch.device("cpu")))
    with _Largest() as made:
        attention[0](*own, sequences).sum().backward()
    return made.elements / (2 * heads * width)


class _Largest(TorchDispatchMode):
    """The number of elements in the largest tensor that any operation gives."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result
