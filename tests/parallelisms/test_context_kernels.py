"""Attention over a part of the keys: result, sum of the softmax and gradients are those of the formula, on any device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from parallelisms.context.kernels import Mask, Partial, attend, attend_backward, merge

CASES = [
    ("cpu", torch.float32),
    ("cpu", torch.bfloat16),
    *(
        pytest.param("cuda", dtype, marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])
        for dtype in (torch.float32, torch.bfloat16)
    ),
]  # fmt: skip


@pytest.mark.parametrize("value_width", [16, 8], ids=["as wide as keys", "narrower than keys"])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("seen", ["all", "causal", "mask"])
@pytest.mark.parametrize(("device", "dtype"), CASES)
def test_two_parts_of_the_keys_are_one_attention(
    device: str, dtype: torch.dtype, seen: str, kv_heads: int, value_width: int
) -> None:
    """The first part has as many keys as there are queries, the second some more; a query sees none of them."""
    torch.manual_seed(0)
    first, second = 40, 24

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    q, gradient = normal(2, 4, first, 16), normal(2, 4, first, value_width)
    k, v = normal(2, kv_heads, first + second, 16), normal(2, kv_heads, first + second, value_width)
    visible = torch.ones(2, 1, first, first + second, dtype=torch.bool, device=device)
    if seen == "causal":
        visible[..., :first] = torch.ones(first, first, device=device).tril().bool()
    if seen == "mask":
        visible = torch.rand(visible.shape, device=device) < 0.5
        visible[..., 0] = True
        visible[:, :, 3, first:] = False

    parts = (slice(0, first), slice(first, first + second))
    masks = [Mask.of(visible[..., part], dtype) if seen == "mask" else None for part in parts]
    causal = [seen == "causal", False]
    results = [
        attend(q, k[:, :, part], v[:, :, part], scale=0.2, causal=c, mask=m)
        for part, c, m in zip(parts, causal, masks, strict=True)
    ]
    whole = Partial(results[0].output.float().clone(), results[0].lse.clone())
    merge(whole, results[1])
    rounded = Partial(whole.output.to(dtype), whole.lse)
    found = [
        attend_backward(gradient, q, k[:, :, part], v[:, :, part], rounded, scale=0.2, causal=c, mask=m)
        for part, c, m in zip(parts, causal, masks, strict=True)
    ]

    output, lse, dq, dk, dv = _formula(q, k, v, gradient, visible)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    _assert_close(whole.output, output, tolerance)
    _assert_close(whole.lse, lse, tolerance)
    _assert_close(found[0].q.float() + found[1].q.float(), dq, tolerance)
    _assert_close(torch.cat([each.k for each in found], dim=2), dk, tolerance)
    _assert_close(torch.cat([each.v for each in found], dim=2), dv, tolerance)


def _formula(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, visible: Tensor) -> tuple[Tensor, ...]:
    q, k, v = (x.double().detach().requires_grad_() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    scores = (q @ k.repeat_interleave(group, dim=1).mT * 0.2).masked_fill(~visible, -torch.inf)
    output = scores.softmax(dim=-1) @ v.repeat_interleave(group, dim=1)
    gradients = torch.autograd.grad(output, (q, k, v), gradient.double())
    return output.detach(), scores.detach().logsumexp(dim=-1), *gradients


def _assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    difference = float((found.double() - expected).norm() / expected.norm())
    assert difference < tolerance
