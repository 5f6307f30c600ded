"""Documents to sequences of a fixed number T of inputs, each with the position at which the next begins.

`cut`: the stream is cut where a sequence is full. Sequences overlap by one token: the last label of one is the first
input of the next. No token of the stream is lost or seen twice as an input.

    stream     t0 t1 t2 t3 t4 t5 t6 ...        T = 3
    row 0      t0 t1 t2 t3                     inputs t0 t1 t2, labels t1 t2 t3
    row 1               t3 t4 t5 t6            inputs t3 t4 t5, labels t4 t5 t6

`best_fit`: documents of at most T tokens stay whole. Enough consecutive ones for `lookahead` sequences are packed at a
time, the longest first, each into the sequence that it fills best (best-fit decreasing, D. Johnson 1974; for training,
H. Ding et al., "Fewer Truncations Improve Language Modeling", 2024). Which documents are packed together follows from
where the first lies, so the position in the stream is that place and the number of sequences since: documents that
wait need not be saved, they are read again.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from trainer.data.stream import Piece, Position, Tokens


@dataclass(frozen=True)
class Part:
    """Of one document in a sequence: the first `inputs` of these tokens are inputs, each one's label is the next."""

    piece: Piece
    inputs: int


@dataclass(frozen=True)
class Row:
    """A sequence: parts of documents, and where the next sequence begins; None: nowhere. Tokens are not copied yet.

    `bad` counts the documents that were bad, from the sequence before to this one.
    """

    parts: tuple[Part, ...]
    after: Position | None
    bad: int = 0

    @property
    def inputs(self) -> int:
        """Tokens that are inputs; the rest of the sequence is to be filled up."""
        return sum(part.inputs for part in self.parts)

    def fill(self, tokens: Tokens, labels: Tokens, documents: Tokens, *, joined: bool) -> None:
        """Write inputs, labels and the number of each one's document, all (T,), over what they hold.

        `joined`: the first token of a document is the label of the last of the one before.
        """
        at = 0
        for number, part in enumerate(self.parts):
            piece, end = part.piece, at + part.inputs
            tokens[at:end] = piece.tokens[: part.inputs]
            documents[at:end] = number
            begin, first = (at - 1, 0) if joined and at else (at, 1)
            targets = piece.tokens[first : part.inputs + 1]
            place = slice(begin, begin + len(targets))
            if piece.learned is None:
                labels[place] = targets
            else:
                learned = piece.learned[first : part.inputs + 1]
                labels[place][learned] = targets[learned]
            at = end
        documents[at:] = len(self.parts)


def cut(pieces: Iterable[Piece], length: int) -> Iterator[Row]:
    """Cut the stream into sequences of `length` inputs.

    The last one of a stream that ends holds what is left. A single token that is left has been a label, and there is
    none for it.
    """
    waiting = iter(pieces)
    held: deque[Piece] = deque()
    count = bad = 0
    while True:
        while count <= length:
            piece = next(waiting, None)
            if piece is None:
                if count > 1:
                    yield Row(_parts(held, count), None, bad)
                return
            bad += piece.bad
            if len(piece.tokens):
                held.append(piece)
                count += len(piece.tokens)
        parts = _parts(held, length)
        _drop(held, length)
        count -= length
        yield Row(parts, held[0].start, bad)
        bad = 0


def best_fit(pieces: Iterable[Piece], start: Position, length: int, lookahead: int) -> Iterator[Row]:
    """Pack the documents from `start` on, of which `pieces` are those without the sequences before `start.row`."""
    waiting = iter(pieces)
    ahead = next(waiting, None)
    begin, skipped = replace(start, row=0), start.row
    while ahead is not None:
        chunks: list[Part] = []
        count = bad = 0
        while ahead is not None and count < lookahead * length:
            bad += ahead.bad
            chunks += _chunks(ahead, length)
            count += len(ahead.tokens)
            ahead = next(waiting, None)
        after = None if ahead is None else ahead.start
        rows = _pack(chunks, length)
        for number in range(skipped, len(rows)):
            following = replace(begin, row=number + 1) if number + 1 < len(rows) else after
            yield Row(rows[number], following, 0 if number else bad)
        if after is not None:
            begin, skipped = after, 0


def _pack(chunks: list[Part], length: int) -> list[tuple[Part, ...]]:
    """The parts in rows of at most `length` inputs; rows by their first part, parts within one, in the old order."""
    rooms: list[tuple[int, int]] = []  # what is free in a row, and which row, sorted
    rows: list[list[int]] = []
    for index in sorted(range(len(chunks)), key=lambda index: -chunks[index].inputs):
        size = chunks[index].inputs
        best = bisect_left(rooms, (size, 0))
        if best < len(rooms):
            room, row = rooms.pop(best)
        else:
            room, row = length, len(rows)
            rows.append([])
        rows[row].append(index)
        if room > size:
            insort(rooms, (room - size, row))
    return [tuple(chunks[index] for index in row) for row in sorted(sorted(row) for row in rows)]


def _chunks(piece: Piece, length: int) -> Iterator[Part]:
    """A document in parts of at most `length` inputs; each but the last has its label from the next one."""
    left = piece
    while len(left.tokens) > length:
        yield Part(left, length)
        left = left.drop(length)
    # A single token that is left of a longer document has been a label, and there is none for it.
    if len(left.tokens) > 1 or (left is piece and len(left.tokens)):
        yield Part(left, len(left.tokens))


def _parts(held: deque[Piece], count: int) -> tuple[Part, ...]:
    """The parts of the first `count` tokens; the last one may hold only the label of the one before."""
    parts = []
    for piece in held:
        parts.append(Part(piece, min(count, len(piece.tokens))))
        # Full, and its last label is at hand: in this piece, or as the first token of the one that has no input here.
        if parts[-1].inputs < len(piece.tokens):
            break
        count -= parts[-1].inputs
    return tuple(parts)


def _drop(held: deque[Piece], count: int) -> None:
    """Drop the first `count` tokens; at least one stays."""
    while count >= len(held[0].tokens):
        count -= len(held.popleft().tokens)
    if count:
        held[0] = held[0].drop(count)
