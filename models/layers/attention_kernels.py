"""The kernels that compute attention, and how each is told which keys a query sees.

- `Sdpa`: torch's scaled-dot-product attention, which picks the fused kernel of the device. What is more than causal
  order it gets as a matrix (T, T) of each sequence, and computes all of it.
- `Flash`: flash attention (Dao 2023, arXiv 2307.08691) and nothing else. Documents and windows it gets as lengths of
  sequences that lie one after the other; that kernel is for accelerators only.
- `Flex`: flex attention (Dong et al. 2024, arXiv 2412.05496), compiled on accelerators. It leaves out blocks of
  128 × 128 in which nothing is seen. No gradients on a CPU.

All give the same result. A mask is made once for a microbatch and used by all layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Mask = Any
"""What a kernel must be told beside causal order, in its own terms; None: nothing."""


@dataclass(frozen=True)
class Sight:
    """Which keys each query sees: itself and those before it, within these limits.

    Attributes:
        rows: sequences (B).
        queries: tokens that see (T), the last ones of the keys.
        keys: tokens that are seen (S).
        window: a query sees so many keys at most, its own included; None: no limit.
        documents: (B, S), see `models.layers.sequences`; not for `Flash` where T < S. None: each sequence is one.
        dtype: of queries and keys.
        device: where they are.
    """

    rows: int
    queries: int
    keys: int
    window: int | None
    documents: Tensor | None
    dtype: torch.dtype
    device: torch.device

    @property
    def is_causal_order(self) -> bool:
        """Whether there is nothing to say beside causal order, as kernels understand it: T = S, or one query."""
        unlimited = self.documents is None and (self.window is None or self.window >= self.keys)
        return unlimited and (self.queries == self.keys or self.queries == 1)

    def condition(self) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """True where a query sees a key: of indices of sequence, head, query and key, element by element."""
        first, window, documents = self.keys - self.queries, self.window, self.documents

        def seen(sequence: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            place = query + first
            result = place >= key
            if window is not None:
                result = result & (place - key < window)
            if documents is not None:
                result = result & (documents[sequence, place] == documents[sequence, key])
            return result

        return seen


class Kernel(Protocol):
    """One way to compute attention."""

    def mask(self, sight: Sight) -> Mask: ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None) -> Tensor:
        """softmax(q kᵀ · scale) v: (B, H, T, D), (B, KV, S, D) and (B, KV, S, E) to (B, H, T, E)."""
        ...


@dataclass(frozen=True)
class Sdpa:
    """torch's scaled_dot_product_attention."""

    def mask(self, sight: Sight) -> Tensor | None:
        """What is added to the products, (B or 1, 1, T, S), in the type of the queries.

        Not truth values: torch would make this of them again in every layer, and keep each for the backward.
        """
        if sight.is_causal_order:
            return None
        device = sight.device
        sequence = torch.arange(1 if sight.documents is None else sight.rows, device=device).view(-1, 1, 1, 1)
        query = torch.arange(sight.queries, device=device).view(-1, 1)
        key = torch.arange(sight.keys, device=device)
        seen = sight.condition()(sequence, sequence, query, key)
        shape = (len(sequence), 1, sight.queries, sight.keys)
        return torch.zeros(shape, dtype=sight.dtype, device=device).masked_fill_(~seen, -torch.inf)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        heads_per_key = q.shape[1] // k.shape[1]
        if mask is not None and q.is_cuda and heads_per_key > 1:
            # CUDA has no fused kernel with both a mask and shared heads.
            k, v = (each.repeat_interleave(heads_per_key, dim=1) for each in (k, v))
        y = F.scaled_dot_product_attention(
            q,
            k,
            _as_wide_as(k, v),
            attn_mask=mask,
            is_causal=mask is None and bool(q.shape[2] > 1),  # bool: of a compiled length too
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return y[..., : v.shape[-1]]


@dataclass(frozen=True)
class Lengths:
    """Sequences that lie one after the other: their bounds, (sequences + 1,) int32, and the length of the longest."""

    query_bounds: Tensor
    key_bounds: Tensor
    longest_query: int
    longest_key: int
    window: int | None


@dataclass(frozen=True)
class Flash:
    """Flash attention: bfloat16 and accelerators; causal order alone also on a CPU."""

    def mask(self, sight: Sight) -> Lengths | None:
        if sight.is_causal_order:
            return None
        if sight.documents is None:
            each = torch.arange(sight.rows + 1, dtype=torch.int32, device=sight.device)
            return Lengths(each * sight.queries, each * sight.keys, sight.queries, sight.keys, sight.window)
        begins = F.pad(sight.documents[:, 1:] != sight.documents[:, :-1], (1, 0), value=True).flatten()
        bounds = F.pad(begins.nonzero().flatten(), (0, 1), value=begins.numel()).to(torch.int32)
        longest = int(bounds.diff().max())
        return Lengths(bounds, bounds, longest, longest, sight.window)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Lengths | None, scale: float | None) -> Tensor:
        if mask is None:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return Sdpa().attend(q, k, v, None, scale)
        from torch.nn.attention.varlen import varlen_attn

        y: Any = varlen_attn(
            _tokens_first(q),
            _tokens_first(k),
            _tokens_first(_as_wide_as(k, v)),
            mask.query_bounds,
            mask.key_bounds,
            mask.longest_query,
            mask.longest_key,
            scale=scale,
            window_size=(-1 if mask.window is None else mask.window - 1, 0),
            enable_gqa=q.shape[1] != k.shape[1],
        )
        result: Tensor = y.unflatten(0, (q.shape[0], -1)).transpose(1, 2)[..., : v.shape[-1]]
        return result


@dataclass(frozen=True)
class Flex:
    """Flex attention."""

    def mask(self, sight: Sight) -> BlockMask:
        from torch.nn.attention.flex_attention import create_block_mask

        create: Any = _compiled(create_block_mask) if sight.device.type == "cuda" else create_block_mask
        rows = None if sight.documents is None else sight.rows
        mask: BlockMask = create(sight.condition(), rows, None, sight.queries, sight.keys, sight.device)
        return mask

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float | None) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        # Inside a compiled layer it is compiled as a part of that.
        alone = q.is_cuda and not torch.compiler.is_compiling()
        attention: Any = _compiled(flex_attention) if alone else flex_attention
        grouped = q.shape[1] != k.shape[1]
        y: Tensor = attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=grouped)
        return y


def _tokens_first(x: Tensor) -> Tensor:
    """(B, H, T, D) to (B · T, H, D)."""
    return x.transpose(1, 2).flatten(0, 1)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def _as_wide_as(k: Tensor, v: Tensor) -> Tensor:
    """Values with zeros up to the width of the keys: the fused kernels know one width only."""
    missing = k.shape[-1] - v.shape[-1]
    return F.pad(v, (0, missing)) if missing > 0 else v
