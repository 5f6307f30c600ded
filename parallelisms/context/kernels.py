"""Attention of some queries over some keys that also returns the log-sum-exp of its scores, and its backward.

That sum makes parts over different keys one attention (`merge`). The backward of a part needs the output and the sum
of the whole: probabilities are exp(score - sum), and the row sums of output and its gradient are those of the whole
(Dao et al. 2022, FlashAttention, arXiv 2205.14135, appendix B). The kernels are those that
`scaled_dot_product_attention` chooses from, called by name, since it does not return the sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_ATEN = torch.ops.aten
_EFFICIENT_ALIGNMENT = 32  # rows to which the efficient kernel pads its sums
_WIDTH_ALIGNMENT = 8  # features to which kernels for accelerators want heads padded
_BIAS_ALIGNMENT = 16  # keys to which they want the rows of a bias padded


@dataclass(frozen=True)
class Mask:
    """What queries see of keys beside causal order.

    Attributes:
        bias: (1 or B, 1, T, S) in the type of the queries: 0 where a query sees a key, -inf elsewhere.
        sees: (1 or B, 1, T): whether a query sees any of these keys.
    """

    bias: Tensor
    sees: Tensor

    @classmethod
    def of(cls, seen: Tensor, dtype: torch.dtype) -> Mask:
        """The mask that is True (1 or B, 1, T, S) where a query sees a key."""
        keys = seen.shape[-1]
        padded = -(-keys // _BIAS_ALIGNMENT) * _BIAS_ALIGNMENT
        bias = torch.zeros((*seen.shape[:-1], padded), dtype=dtype, device=seen.device)[..., :keys]
        return cls(bias.masked_fill_(~seen, -torch.inf), seen.any(dim=-1))


@dataclass(frozen=True)
class Partial:
    """Attention over some of the keys: `output` (B, H, T, E), `lse` (B, H, T) in fp32, -inf where nothing is seen."""

    output: Tensor
    lse: Tensor


@dataclass(frozen=True)
class Gradients:
    """Of queries (B, H, T, D), keys (B, KV, S, D) and values (B, KV, S, E)."""

    q: Tensor
    k: Tensor
    v: Tensor


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool = False, mask: Mask | None = None
) -> Partial:
    """softmax(q kᵀ · scale) v over these keys alone.

    Args:
        q: (B, H, T, D).
        k: (B, KV, S, D).
        v: (B, KV, S, E).
        scale: of the products.
        causal: query i sees keys 0 to i; T = S. Not together with a mask, which says everything.
        mask: which keys are seen; None: all, or those that causal order leaves.
    """
    width = v.shape[-1]
    q, k, v = _padded(q, k, v)
    bias = None if mask is None else mask.bias
    if q.device.type == "cpu":
        output, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, is_causal=causal, attn_mask=bias, scale=scale
        )
    elif _has_flash(q, bias):
        output, lse, *_ = _ATEN._scaled_dot_product_flash_attention(q, k, v, is_causal=causal, scale=scale)
    else:
        heads = q.shape[1]
        output, lse, *_ = _ATEN._scaled_dot_product_efficient_attention(
            q, _spread(k, heads), _spread(v, heads), _expanded(bias, q), True, is_causal=causal, scale=scale
        )
        lse = lse[..., : q.shape[2]]
    output, lse = output[..., :width], lse.float()
    if mask is not None:
        # Kernels do not agree on what a query gets that sees nothing.
        output = output.masked_fill(~mask.sees[..., None], 0.0)
        lse = lse.masked_fill(~mask.sees, -torch.inf)
    return Partial(output, lse)


def attend_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    whole: Partial,
    *,
    scale: float,
    causal: bool = False,
    mask: Mask | None = None,
) -> Gradients:
    """What these keys contribute to the gradients, from the gradient (B, H, T, E) of the output over all keys.

    `whole` is the attention of the queries over all keys, of which these are a part.
    """
    key_width, value_width = q.shape[-1], v.shape[-1]
    q, k, v = _padded(q, k, v)
    width = v.shape[-1]
    gradient, output, lse = _to_width(gradient, width), _to_width(whole.output, width), whole.lse
    bias = None if mask is None else mask.bias
    if q.device.type == "cpu":
        gradients = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, output, lse, 0.0, causal, attn_mask=bias, scale=scale
        )
    elif _has_flash(q, bias):
        gradients = _flash_backward(gradient, q, k, v, output, lse, causal, scale)
    else:
        gradients = _efficient_backward(gradient, q, k, v, output, lse, bias, causal, scale)
    dq, dk, dv = gradients
    return Gradients(dq[..., :key_width], dk[..., :key_width], dv[..., :value_width])


def merge(whole: Partial, part: Partial) -> None:
    """Add the attention over other keys to `whole`, in place; `whole` is in fp32 and every query of it sees some key.

    With a = lse of the whole and b = that of the part, the new output is the mean of both with weights e^a and e^b.
    """
    lse = torch.logaddexp(whole.lse, part.lse)
    kept = torch.exp(whole.lse - lse).unsqueeze(-1)
    added = torch.exp(part.lse - lse).unsqueeze(-1)
    whole.output.mul_(kept).addcmul_(part.output.float(), added)
    whole.lse.copy_(lse)


def _flash_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    nothing = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the state of a dropout that there is not
    return _ATEN._scaled_dot_product_flash_attention_backward(
        gradient,
        q,
        k,
        v,
        output,
        lse.contiguous(),
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
        nothing,
        nothing.new_empty(()),
        scale=scale,
    )


def _efficient_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    heads, kv_heads = q.shape[1], k.shape[1]
    nothing = torch.zeros((), dtype=torch.int64, device=q.device)
    dq, dk, dv, _ = _ATEN._scaled_dot_product_efficient_attention_backward(
        gradient,
        q,
        _spread(k, heads),
        _spread(v, heads),
        _expanded(bias, q),
        output,
        # As its forward pads: rows that do not exist have no probability anywhere.
        F.pad(lse, (0, -lse.shape[-1] % _EFFICIENT_ALIGNMENT), value=torch.inf),
        nothing,
        nothing,
        0.0,
        [True, True, True, False],
        causal,
        scale=scale,
    )
    return dq, _gathered(dk, kv_heads), _gathered(dv, kv_heads)


def _has_flash(q: Tensor, bias: Tensor | None) -> bool:
    """Whether the flash kernel of accelerators can do it: half precision, no mask."""
    return bias is None and q.dtype in (torch.bfloat16, torch.float16)


def _padded(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All heads of one width that kernels take; more zeros change neither scores nor the features asked for."""
    width = max(q.shape[-1], v.shape[-1])
    if q.device.type != "cpu":
        width += -width % _WIDTH_ALIGNMENT
    return _to_width(q, width), _to_width(k, width), _to_width(v, width)


def _to_width(x: Tensor, width: int) -> Tensor:
    """With zeros up to that width, and the features of a head side by side: kernels read them so without looking."""
    if x.shape[-1] != width:
        return F.pad(x, (0, width - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


def _expanded(bias: Tensor | None, q: Tensor) -> Tensor | None:
    return None if bias is None else bias.expand(q.shape[0], q.shape[1], -1, -1)


def _spread(x: Tensor, heads: int) -> Tensor:
    """Each key or value head once for every query head that uses it."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _gathered(gradient: Tensor, kv_heads: int) -> Tensor:
    """The gradient of what `_spread` was given."""
    if gradient.shape[1] == kv_heads:
        return gradient
    return gradient.unflatten(1, (kv_heads, -1)).sum(dim=2)
