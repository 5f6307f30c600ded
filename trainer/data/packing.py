"""A stream of tokens, cut into windows of a fixed length, each with the position at which the next begins.

Windows overlap by one token: the last label of a window is the first input of the next. No token of the stream
is lost or seen twice as an input.

    stream    t0 t1 t2 t3 t4 t5 t6 ...        window length 3
    window 0  t0 t1 t2 t3                     inputs t0 t1 t2, labels t1 t2 t3
    window 1           t3 t4 t5 t6            inputs t3 t4 t5, labels t4 t5 t6
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from trainer.data.stream import Piece, Position, Tokens


@dataclass(frozen=True)
class Window:
    """Tokens (length + 1,), fewer at the end of the stream, and where the next window begins; None: nowhere.

    `documents` counts, for each token, the documents that began in the window before its own: 0, 0, 1, 1, 1, ...
    """

    tokens: Tokens
    documents: Tokens
    after: Position | None


def windows(pieces: Iterable[Piece], length: int) -> Iterator[Window]:
    """Cut the stream into windows of `length` inputs.

    The last window of a stream that ends holds what is left. A single token that is left has been a label, and there is none for it.
    """
    waiting = iter(pieces)
    held: deque[Piece] = deque()
    count = 0
    while True:
        while count <= length:
            piece = next(waiting, None)
            if piece is None:
                if count > 1:
                    yield Window(*_join(held, count), after=None)
                return
            held.append(piece)
            count += len(piece.tokens)
        tokens, documents = _join(held, length + 1)
        _drop(held, length)
        count -= length
        yield Window(tokens, documents, held[0].start)


def _join(held: deque[Piece], count: int) -> tuple[Tokens, Tokens]:
    """The first `count` tokens, and of each the index of its piece."""
    parts = []
    for piece in held:
        parts.append(piece.tokens[:count])
        count -= len(parts[-1])
        if count == 0:
            break
    indices = np.arange(len(parts), dtype=np.int32)
    return np.concatenate(parts), np.repeat(indices, [len(part) for part in parts])


def _drop(held: deque[Piece], count: int) -> None:
    """Drop the first `count` tokens; at least one stays."""
    while count >= len(held[0].tokens):
        count -= len(held.popleft().tokens)
    if count:
        held[0] = held[0].drop(count)
