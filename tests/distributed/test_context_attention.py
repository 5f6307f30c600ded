"""Attention that spans context ranks is attention of one process: outputs and gradients, whatever the shapes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from models.layers.attend import Attend
from models.layers.sequences import Sequences
from parallelisms.context.apply import apply_context_parallelism
from parallelisms.context.cut import SequenceCut
from parallelisms.context.split import SequenceSplit
from parallelisms.layout import RotateMethod
from tests.distributed.ranks import run_ranks

_METHODS: tuple[RotateMethod, ...] = ("allgather", "alltoall", "ulysses")
_CASES_IN_A_FORK = 40


@dataclass(frozen=True)
class Case:
    """Attention over `degree` ranks; sizes that are multiples of something are given by the factor."""

    degree: int
    method: RotateMethod
    balanced: bool
    chunk: int
    batch: int
    kv_heads: int
    group: int
    width: int
    value_width: int
    window: int | None
    scale: float | None
    documents: bool
    seed: int

    @property
    def split(self) -> SequenceSplit:
        return SequenceSplit(self.degree, self.balanced)

    @property
    def length(self) -> int:
        return self.split.divisor * self.chunk


@st.composite
def cases(draw: st.DrawFn, degree: int) -> Case:
    method = draw(st.sampled_from(_METHODS))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    if method == "ulysses":  # ranks get equally many heads
        kv_heads = draw(st.sampled_from([1, degree // 2, degree, 2 * degree]))
        group *= degree
    width = draw(st.sampled_from([4, 8, 24]))
    return Case(
        degree=degree,
        method=method,
        balanced=draw(st.booleans()),
        chunk=draw(st.integers(1, 9)),
        batch=draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        group=group,
        width=width,
        value_width=draw(st.sampled_from([width, 8])),
        window=draw(st.none() | st.integers(1, 40)),
        scale=draw(st.none() | st.just(0.3)),
        documents=draw(st.booleans()),
        seed=draw(st.integers(0, 2**20)),
    )


@pytest.mark.parametrize("degree", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_spanning_attention_and_its_gradients_equal_those_of_one_process(degree: int) -> None:
    """Many cases in each fork; hypothesis draws the simplest ones first, so the first fork proves little."""

    @settings(max_examples=2 if degree == 2 else 3, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(cases(degree), min_size=_CASES_IN_A_FORK, max_size=_CASES_IN_A_FORK))
    def check(drawn: list[Case]) -> None:
        for case, *errors in zip(drawn, *run_ranks(errors_of, degree, drawn, timeout=60), strict=True):
            assert max(map(max, errors)) < 2e-5, (case, errors)

    check()


def errors_of(rank: int, drawn: list[Case]) -> list[list[float]]:
    """Of each case, how far output and gradients on this rank are from the formula, relative to the largest number, or to 1."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return [_errors(case, rank, mesh) for case in drawn]


def _errors(case: Case, rank: int, mesh: object) -> list[float]:
    torch.manual_seed(case.seed)
    heads = case.kv_heads * case.group
    q = torch.randn(case.batch, heads, case.length, case.width)
    k = torch.randn(case.batch, case.kv_heads, case.length, case.width)
    v = torch.randn(case.batch, case.kv_heads, case.length, case.value_width)
    gradient = torch.randn(case.batch, heads, case.length, case.value_width)
    documents = None
    if case.documents:
        documents = (torch.rand(case.batch, case.length) < 0.2).cumsum(dim=1)
    expected = _by_the_formula(case, q, k, v, gradient, documents)

    attention = nn.ModuleList([Attend(case.scale, case.window)])
    apply_context_parallelism(attention, mesh, case.split, case.method)
    cut = SequenceCut(case.split, rank)
    sequences = cut.sequences(Sequences(torch.arange(case.length), documents))
    own = [_part(cut, x).requires_grad_() for x in (q, k, v)]
    output = attention[0](*own, sequences)
    output.backward(_part(cut, gradient))
    found = (output.detach(), *(x.grad for x in own))
    return [
        float((f - _part(cut, e)).abs().max() / e.abs().max().clamp(min=1.0))
        for f, e in zip(found, expected, strict=True)
    ]


def _by_the_formula(
    case: Case, q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, documents: Tensor | None
) -> list[Tensor]:
    """Output and gradients of softmax(q kᵀ · scale) v in float64, with nothing of the program in it."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    spread = [x.repeat_interleave(case.group, dim=1) for x in (k, v)]
    scores = q @ spread[0].mT * (case.width**-0.5 if case.scale is None else case.scale)
    place = torch.arange(case.length)
    distance = place[:, None] - place
    hidden = distance < 0
    if case.window is not None:
        hidden = hidden | (distance >= case.window)
    if documents is not None:
        hidden = hidden | (documents[:, None, :, None] != documents[:, None, None, :])
    output = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1) @ spread[1]
    output.backward(gradient.double())
    return [output.detach(), *(x.grad for x in (q, k, v))]


def _part(cut: SequenceCut, x: Tensor) -> Tensor:
    """The rank's tokens of (B, H, T, D)."""
    return cut.part(x.transpose(2, 3)).transpose(2, 3)
