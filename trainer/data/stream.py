"""Documents, in the order of their epochs, to one stream of tokens that begins at any position of it.

The stream depends on the data, the tokenizer and the settings here alone: not on ranks, batches or interruptions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.data.permutation import Permutation
from trainer.data.sources import IndexedSource, Source, StreamingSource, TokenizedSource
from trainer.data.tokenizer import Tokenizer
from trainer.errors import ConfigurationError

Tokens = npt.NDArray[np.integer]

ENCODED_AHEAD = 64_000
"""Characters. Documents are encoded together until they hold so many: enough to save the cost of each call, little
enough that the step does not wait long for it."""


@dataclass(frozen=True, order=True)
class Position:
    """Where a token lies: its epoch, its document's place in the order of that epoch, its offset there."""

    epoch: int = 0
    document: int = 0
    offset: int = 0


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens (n,), n > 0, of one document, of which the first lies at `start`."""

    tokens: Tokens
    start: Position

    def drop(self, count: int) -> Piece:
        """The piece without its first `count` tokens."""
        start = Position(self.start.epoch, self.start.document, self.start.offset + count)
        return Piece(self.tokens[count:], start)


@dataclass(frozen=True)
class TokenStream:
    """The tokens of `source`, epoch after epoch, each document between begin and end tokens.

    Documents without a token of their own give none at all. With `shuffle`, a source that has a length is read in an
    order of its own in each epoch, given by (seed, epoch); a streaming source is read as it comes. Documents that are
    tokens already are taken as they are; ConfigurationError is raised if they are another tokenizer's.
    """

    source: Source
    tokenizer: Tokenizer
    shuffle: bool = False
    seed: int = 0
    add_bos: bool = True
    add_eos: bool = True
    epochs: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.source, TokenizedSource):
            self.source.check(self.tokenizer, self.add_bos, self.add_eos)

    @property
    def end(self) -> Position:
        """The position after the last epoch. Raises ValueError where `epochs` is unset: there is none."""
        if self.epochs is None:
            raise ValueError("a stream that repeats for ever has no end")
        return Position(self.epochs)

    def describe(self) -> dict[str, str | int | bool]:
        """What gives a position its meaning: if any of it changes, a position lies somewhere else."""
        return {
            "source": self.source.fingerprint,
            "vocabulary": self.tokenizer.vocab_size,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "add_bos": self.add_bos,
            "add_eos": self.add_eos,
        }

    def pieces(self, start: Position) -> Iterator[Piece]:
        """The stream from the token at `start` on; a position past the end of its document means the next one.

        Encodes no document before that of `start`. Raises ConfigurationError if a whole epoch gives no token.
        """
        epochs = itertools.count(start.epoch) if self.epochs is None else range(start.epoch, self.epochs)
        for epoch in epochs:
            first = start.document if epoch == start.epoch else 0
            empty = True
            for piece in self._of_epoch(Position(epoch, first)):
                empty = False
                skipped = (
                    start.offset if epoch == start.epoch and piece.start.document == start.document else 0
                )
                if skipped < len(piece.tokens):
                    yield piece.drop(skipped) if skipped else piece
            if empty and first == 0:
                raise ConfigurationError(f"{self.source.name}: none of the documents holds text")

    def _of_epoch(self, first: Position) -> Iterator[Piece]:
        """A piece for each document that has tokens, from that at `first` to the end of its epoch."""
        source = self.source
        if isinstance(source, TokenizedSource):
            for place, index in enumerate(self._order(source, first), start=first.document):
                tokens = source.read(index)
                if len(tokens):
                    yield Piece(tokens, Position(first.epoch, place))
        elif isinstance(source, StreamingSource):
            yield from self._encode(source.documents(first.document), first)
        else:
            texts = (source.read(index) for index in self._order(source, first))
            yield from self._encode(texts, first)

    def _order(self, source: IndexedSource | TokenizedSource, first: Position) -> Iterator[int]:
        """The documents of an epoch by their index, from the place of `first` on."""
        places = range(first.document, len(source))
        if not self.shuffle:
            return iter(places)
        order = Permutation(len(source), self.seed, first.epoch)
        return (order[place] for place in places)

    def _encode(self, texts: Iterable[str], first: Position) -> Iterator[Piece]:
        """A piece for each text that has tokens."""
        bos, eos = self.tokenizer.bos_id, self.tokenizer.eos_id
        begin = [bos] if self.add_bos and bos is not None else []
        end = [eos] if self.add_eos and eos is not None else []
        place = first.document
        for group in _groups(texts):
            for ids in self.tokenizer.encode_batch(group):
                if ids:
                    tokens = np.array(begin + ids + end, dtype=np.int32)
                    yield Piece(tokens, Position(first.epoch, place))
                place += 1


def _groups(texts: Iterable[str]) -> Iterator[list[str]]:
    group: list[str] = []
    held = 0
    for text in texts:
        group.append(text)
        # An empty document counts too, so that a source of nothing else does not gather for ever.
        held += len(text) + 1
        if held >= ENCODED_AHEAD:
            yield group
            group, held = [], 0
    if group:
        yield group
