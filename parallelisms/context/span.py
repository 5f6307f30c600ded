"""What the methods of context parallelism share: who takes part, what sees what, and sums over blocks of keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from parallelisms import collectives
from parallelisms.context.kernels import Gradients, Mask, Partial, attend, attend_backward, merge
from parallelisms.context.split import Block, SequenceSplit, visible_blocks


@dataclass(frozen=True)
class Group:
    """The context ranks among which a sequence is divided, and this rank's place."""

    collective: collectives.Group
    split: SequenceSplit

    @property
    def rank(self) -> int:
        return self.collective.rank

    @property
    def size(self) -> int:
        return self.collective.size


@dataclass(frozen=True)
class Tokens:
    """Tokens of one sequence: the chunks of positions that they are, in their order, and their documents (B, t)."""

    chunks: tuple[range, ...]
    documents: Tensor | None

    def positions(self, device: torch.device) -> Tensor:
        """(t,), the place of each in the sequence."""
        return torch.cat([torch.arange(chunk.start, chunk.stop, device=device) for chunk in self.chunks])


@dataclass(frozen=True)
class Span:
    """Attention of this rank's queries over keys of all ranks: one call of one layer.

    Attributes:
        group: who takes part.
        length: T, tokens of a whole sequence.
        scale: of the products.
        window: how many tokens each token sees, itself included; None: all before it.
        documents: (B, T), those of all tokens; None: a sequence is one document.
    """

    group: Group
    length: int
    scale: float
    window: int | None
    documents: Tensor | None

    def tokens_of(self, rank: int) -> Tokens:
        """The tokens of one rank."""
        chunks = self.group.split.chunks(rank, self.length)
        if self.documents is None:
            return Tokens(chunks, None)
        parts = [self.documents[:, chunk.start : chunk.stop] for chunk in chunks]
        return Tokens(chunks, torch.cat(parts, dim=1))

    @property
    def all_tokens(self) -> Tokens:
        """Those of the whole sequence, in order."""
        return Tokens((range(self.length),), self.documents)

    def blocks(self, keys: Tokens, like: Tensor) -> Iterator[tuple[Block, Mask | None]]:
        """The blocks that this rank computes over these keys, each with its mask in the type of `like`."""
        queries = self.tokens_of(self.group.rank)
        for block in visible_blocks(queries.chunks, keys.chunks, self.window):
            hidden = block.windowed or self.documents is not None
            yield block, _mask(block, queries, keys, self.window, like) if hidden else None


def rows(x: Tensor, which: range) -> Tensor:
    """Some tokens of (B, H, T, D), a view."""
    return x[:, :, which.start : which.stop]


class Sum:
    """The attention of this rank's queries (B, H, t, D) to all keys, added up block by block in fp32."""

    def __init__(self, span: Span, q: Tensor, value_width: int) -> None:
        self._span = span
        self._q = q
        batch, heads, length, _ = q.shape
        # The layout in which the layer wants it: heads of a token side by side.
        output = q.new_empty((batch, length, heads, value_width), dtype=torch.float32).transpose(1, 2)
        self._sum = Partial(output, q.new_empty((batch, heads, length), dtype=torch.float32))

    def add(self, keys: Tokens, k: Tensor, v: Tensor) -> None:
        """Add what is seen of the keys k (B, KV, s, D) and values v (B, KV, s, E). The rank's own come first."""
        for block, mask in self._span.blocks(keys, self._q):
            part = attend(
                rows(self._q, block.queries),
                rows(k, block.keys),
                rows(v, block.keys),
                scale=self._span.scale,
                causal=block.causal and mask is None,
                mask=mask,
            )
            into = Partial(rows(self._sum.output, block.queries), _columns(self._sum.lse, block.queries))
            if block.causal:  # the first that these queries see
                into.output.copy_(part.output)
                into.lse.copy_(part.lse)
            else:
                merge(into, part)

    def result(self) -> Partial:
        """The attention over everything that was added, its output in the type of the queries."""
        return Partial(self._sum.output.to(self._q.dtype), self._sum.lse)


@dataclass(frozen=True)
class Contribution:
    """What this rank's queries add to the gradients of some keys and values."""

    keys: range
    k: Tensor
    v: Tensor


class BackwardSum:
    """The gradient of this rank's queries, added up in fp32, and what they contribute to keys and values."""

    def __init__(self, span: Span, q: Tensor, whole: Partial, gradient: Tensor) -> None:
        self._span = span
        self._q = q
        self._whole = whole
        self._gradient = gradient
        self.q = torch.zeros_like(q, dtype=torch.float32)

    def contributions(self, keys: Tokens, k: Tensor, v: Tensor) -> Iterator[Contribution]:
        """Go through the blocks over these keys; the gradient of the queries grows with each."""
        for block, mask in self._span.blocks(keys, self._q):
            queries = block.queries
            parts: Gradients = attend_backward(
                rows(self._gradient, queries),
                rows(self._q, queries),
                rows(k, block.keys),
                rows(v, block.keys),
                Partial(rows(self._whole.output, queries), _columns(self._whole.lse, queries)),
                scale=self._span.scale,
                causal=block.causal and mask is None,
                mask=mask,
            )
            rows(self.q, queries).add_(parts.q)
            yield Contribution(block.keys, parts.k, parts.v)


@dataclass(frozen=True)
class KeysAndValues:
    """Keys (B, KV, s, D) and values (B, KV, s, E) as views of one buffer, which travels in one message."""

    buffer: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def of(cls, k: Tensor, v: Tensor) -> KeysAndValues:
        """A copy of both."""
        made = cls.within(k.new_empty(k.numel() + v.numel()), k.shape, v.shape)
        made.k.copy_(k)
        made.v.copy_(v)
        return made

    @classmethod
    def within(cls, buffer: Tensor, k: torch.Size, v: torch.Size) -> KeysAndValues:
        """Views of these shapes of a buffer (numbers in both,)."""
        return cls(buffer, buffer[: k.numel()].view(k), buffer[k.numel() :].view(v))

    def like(self, buffer: Tensor) -> KeysAndValues:
        """Views of the same shapes of another buffer."""
        return KeysAndValues.within(buffer, self.k.shape, self.v.shape)

    def add(self, contribution: Contribution) -> None:
        """Add to the gradients that this holds."""
        rows(self.k, contribution.keys).add_(contribution.k)
        rows(self.v, contribution.keys).add_(contribution.v)


def _mask(block: Block, queries: Tokens, keys: Tokens, window: int | None, like: Tensor) -> Mask:
    device = like.device
    distance = (
        queries.positions(device)[block.queries.start : block.queries.stop, None]
        - keys.positions(device)[block.keys.start : block.keys.stop]
    )
    seen = distance >= 0
    if window is not None:
        seen = seen & (distance < window)
    seen = seen[None]
    if queries.documents is not None and keys.documents is not None:
        of_queries = _columns(queries.documents, block.queries)
        of_keys = _columns(keys.documents, block.keys)
        seen = seen & (of_queries[:, :, None] == of_keys[:, None, :])
    return Mask.of(seen[:, None], like.dtype)


def _columns(x: Tensor, columns: range) -> Tensor:
    """Some tokens of (..., T), a view."""
    return x[..., columns.start : columns.stop]
