"""Documents, in the order of their epochs, to one stream of tokens that begins at any position of it.

The stream depends on the data, the tokenizer and the settings here alone: not on ranks, workers, batches or
interruptions.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from trainer.data.encoding import Encode, encode_here, groups
from trainer.data.errors import SourceFailed
from trainer.data.permutation import Permutation
from trainer.data.sources import (
    ChatSource,
    Conversation,
    FlawedText,
    IndexedSource,
    Segment,
    Source,
    StreamingSource,
    Text,
    TokenizedSource,
)
from trainer.data.tokenizer import Tokenizer
from trainer.errors import ConfigurationError

Tokens = npt.NDArray[np.integer]
OnError = Literal["skip", "stop"]

_log = logging.getLogger(__name__)
_NAMED = 10  # bad documents; more of them would hide what else is said


@dataclass(frozen=True, order=True)
class Position:
    """Where a token lies: its epoch, its document's place in the order of that epoch, its offset there.

    Where documents are packed together by best fit, the `row`-th sequence of those packed from there on."""

    epoch: int = 0
    document: int = 0
    offset: int = 0
    row: int = 0


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens (n,) of one document, of which the first lies at `start`.

    `learned` (n,) says of which of them the loss is taken; None: of all. `bad` counts the documents that were bad,
    from the piece before to this one; n is 0 only if no piece is left that could tell it.
    """

    tokens: Tokens
    start: Position
    learned: npt.NDArray[np.bool_] | None = None
    bad: int = 0

    def drop(self, count: int) -> Piece:
        """The piece without its first `count` tokens."""
        start = Position(self.start.epoch, self.start.document, self.start.offset + count)
        learned = None if self.learned is None else self.learned[count:]
        return Piece(self.tokens[count:], start, learned)


@dataclass(frozen=True)
class TokenStream:
    """The tokens of `source`, epoch after epoch, each document between begin and end tokens.

    Documents without a token of their own give none at all. With `shuffle`, a source that has a length is read in an
    order of its own in each epoch, given by (seed, epoch). A streaming source is read as it comes, or with
    `shuffle_buffer` each so many consecutive documents in an order given by (seed, epoch, their place). Documents that
    are tokens already are taken as they are; ConfigurationError is raised if they are another tokenizer's.

    Of each epoch only the first `documents` documents of the source are read, if it is set. `on_error` says what
    becomes of a bad one: it is reported, and either left out (or repaired, where that is possible) or the end.
    """

    source: Source
    tokenizer: Tokenizer
    shuffle: bool = False
    seed: int = 0
    add_bos: bool = True
    add_eos: bool = True
    epochs: int | None = None
    documents: int | None = None
    shuffle_buffer: int = 1
    on_error: OnError = "skip"
    template: Callable[[Conversation], tuple[Segment, ...] | FlawedText] | None = None  # of conversations
    _bad: Iterator[int] = field(default_factory=lambda: itertools.count(1), repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.source, TokenizedSource):
            self.source.check(self.tokenizer, self.add_bos, self.add_eos)

    @property
    def end(self) -> Position:
        """The position after the last epoch. Raises ValueError where `epochs` is unset: there is none."""
        if self.epochs is None:
            raise ValueError("a stream that repeats for ever has no end")
        return Position(self.epochs)

    def describe(self) -> dict[str, str | int | bool | None]:
        """What gives a position its meaning: if any of it changes, a position lies somewhere else."""
        described: dict[str, str | int | bool | None] = {
            "source": self.source.fingerprint,
            "vocabulary": self.tokenizer.vocab_size,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "add_bos": self.add_bos,
            "add_eos": self.add_eos,
        }
        if isinstance(self.source, StreamingSource):
            described["shuffle_buffer"] = self.shuffle_buffer
        if self.documents is not None:
            described["documents"] = self.documents
        return described

    def pieces(self, start: Position, encode: Encode | None = None) -> Iterator[Piece]:
        """The stream from the token at `start` on; a position past the end of its document means the next one.

        Encodes no document before that of `start` (with a shuffle buffer, reads those that it was filled with).
        Raises ConfigurationError if a whole epoch gives no token, and SourceFailed for a document that is bad, if
        that is to be the end.
        """
        encode = encode or encode_here(self.tokenizer)
        epochs = itertools.count(start.epoch) if self.epochs is None else range(start.epoch, self.epochs)
        for epoch in epochs:
            first = start.document if epoch == start.epoch else 0
            empty = True
            for piece in self._of_epoch(Position(epoch, first), encode):
                empty = empty and not len(piece.tokens)
                skipped = (
                    start.offset if epoch == start.epoch and piece.start.document == start.document else 0
                )
                if skipped < len(piece.tokens) or piece.bad:
                    yield piece.drop(skipped) if skipped else piece
            if empty and first == 0:
                raise ConfigurationError(f"{self.source.name}: none of the documents holds text")

    def _of_epoch(self, first: Position, encode: Encode) -> Iterator[Piece]:
        """A piece for each document that has tokens, from that at `first` to the end of its epoch."""
        source = self.source
        if isinstance(source, TokenizedSource):
            for place, index in enumerate(self._order(source, first), start=first.document):
                tokens = source.read(index)
                if len(tokens):
                    yield Piece(tokens, Position(first.epoch, place))
        elif isinstance(source, StreamingSource):
            yield from self._encoded(self._streamed(source, first), first, encode)
        elif isinstance(source, ChatSource):
            documents = (self._document(source.read(index)) for index in self._order(source, first))
            yield from self._encoded(documents, first, encode)
        else:
            texts = (source.read(index) for index in self._order(source, first))
            yield from self._encoded(texts, first, encode)

    def _document(self, conversation: Conversation | FlawedText) -> Text:
        if isinstance(conversation, FlawedText):
            return conversation
        assert self.template is not None
        return self.template(conversation)

    def _order(self, source: IndexedSource | TokenizedSource | ChatSource, first: Position) -> Iterator[int]:
        """The documents of an epoch by their index, from the place of `first` on."""
        count = len(source) if self.documents is None else min(len(source), self.documents)
        if not self.shuffle:
            return iter(range(first.document, count))
        order = Permutation(count, self.seed, first.epoch)
        return order.walk(first.document)

    def _streamed(self, source: StreamingSource, first: Position) -> Iterator[Text]:
        """The documents of an epoch, from the place of `first` on; the buffer they were in is filled again."""
        size = self.shuffle_buffer if self.shuffle else 1
        filled, skipped = divmod(first.document, size)
        texts = source.documents(filled * size)
        if self.documents is not None:
            texts = itertools.islice(texts, max(0, self.documents - filled * size))
        if size == 1:
            yield from texts
            return
        while buffer := list(itertools.islice(texts, size)):
            order = Permutation(len(buffer), self.seed, first.epoch, filled)
            yield from (buffer[index] for index in order.walk(skipped))
            filled, skipped = filled + 1, 0

    def _encoded(self, texts: Iterable[Text], first: Position, encode: Encode) -> Iterator[Piece]:
        """A piece for each text that has tokens."""
        bos, eos = self.tokenizer.bos_id, self.tokenizer.eos_id
        begin = [bos] if self.add_bos and bos is not None else []
        end = [eos] if self.add_eos and eos is not None else []
        place, bad = first.document, 0
        for group, tokens_of in encode(groups(texts, self._judge)):
            for document, (ids, learned) in zip(group.documents, tokens_of, strict=True):
                bad += document.bad
                if ids.size:
                    tokens, learned = _between(begin, ids, learned, end)
                    yield Piece(tokens, Position(first.epoch, place), learned, bad)
                    bad = 0
                place += 1
        if bad:
            yield Piece(np.empty(0, dtype=np.int32), Position(first.epoch, place), None, bad)

    def _judge(self, text: Text) -> bool:
        """Whether a text is bad. Raises SourceFailed if that is to be the end."""
        if not isinstance(text, FlawedText):
            return False
        if self.on_error == "stop":
            raise SourceFailed(f'{self.source.name}: {text.flaw}; data.on_error = "skip" goes on without it')
        number = next(self._bad)
        if number <= _NAMED:
            _log.warning("%s: %s", self.source.name, text.flaw)
        elif number == _NAMED + 1:
            _log.warning("%s: further bad documents are counted only, in the metrics", self.source.name)
        return True


def _between(
    begin: list[int], ids: Tokens, learned: npt.NDArray[np.bool_] | None, end: list[int]
) -> tuple[Tokens, npt.NDArray[np.bool_] | None]:
    """The tokens of a document between its ends, unless it has them already; the end is learned with what it ends."""
    if learned is not None:
        begin = [] if begin and ids[0] == begin[0] else begin
        end = [] if end and ids[-1] == end[0] else end
        flags = [np.zeros(len(begin), dtype=bool), learned, np.full(len(end), learned[-1])]
        learned = np.concatenate(flags)
    return np.concatenate([begin, ids, end], dtype=np.int32, casting="unsafe"), learned
