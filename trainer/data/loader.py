"""Batches of a data-parallel rank, cut from one global sequence of sequences, and a position that resumes it.

With b = batch size, R = data-parallel ranks and A = accumulation steps, global batch k is the sequences
[k b R A, (k + 1) b R A) of the mixture. They are taken in A rounds of b R sequences; rank r gets the r-th b of each
round. So step k holds the same tokens for every R with the same b R A, and the position, which is that of the first
token of the next round, has the same meaning for all of them.

Where a sequence begins depends on all before it. Of text, each rank therefore tokenizes the whole stream and keeps its
share. Of a token store, it follows the index, which says how long documents are, and reads the tokens of its share.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.data.encoding import Workers
from trainer.data.errors import DataExhausted, SourceFailed
from trainer.data.mixture import Mixture, Places
from trainer.data.packing import Row
from trainer.data.prefetch import Prefetcher
from trainer.data.stream import Tokens

if TYPE_CHECKING:
    import torch

    from trainer.data.device import Transfer, Travelling

IGNORE = -100
"""The label of a position that does not count."""

_BATCHES_AHEAD = 2


@dataclass(frozen=True)
class Batch:
    """Inputs and next-token labels, both (B, T) int64; a label is IGNORE where there is no next token.

    Where documents are masked, `documents` (B, T) int32 counts those of each sequence, 0, 0, 1, 1, 1, ..., and the last
    token of a document has no next one: the first token of the next document does not follow from it.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    documents: torch.Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        """The batch on that device."""
        documents = None if self.documents is None else self.documents.to(device)
        return Batch(self.tokens.to(device), self.labels.to(device), documents)


@dataclass(frozen=True)
class Share:
    """Which sequences of the global batch are this rank's: `batch_size` in each of `accumulation` rounds."""

    batch_size: int
    data_rank: int = 0
    data_ranks: int = 1
    accumulation: int = 1

    @property
    def sequences(self) -> int:
        """The sequences of all ranks in one round."""
        return self.batch_size * self.data_ranks


@dataclass(frozen=True)
class DataCounts:
    """What a run has read since its start, on all ranks together."""

    tokens: Mapping[str, int]  # of each source, without those that fill sequences up
    bad_documents: int
    packing_efficiency: float  # share of the positions of all sequences that hold a token of a document


@dataclass(frozen=True)
class _Ready:
    batch: Batch
    after: Places
    travelling: Travelling | None = None  # where batches go to a device


class Loader:
    """The batches of one rank, one after the other, made ahead by a thread, whose texts `workers` processes encode.

    `next(loader)` gives a Batch, A of which make a step. Where the data ends, the last global batch is filled up with
    labels IGNORE, on every rank alike; the step after it raises DataExhausted on all of them.

    With `mask_documents`, batches say which document each token belongs to. With `device` they are on it, copied there
    ahead.
    """

    def __init__(
        self,
        mixture: Mixture,
        share: Share,
        *,
        mask_documents: bool = False,
        workers: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self._mixture = mixture
        self._share = share
        self._maker = _Maker(mixture, share, mask_documents, workers)
        self._places = mixture.start
        self._transfer = _transfer_to(device)
        self._ahead: Prefetcher[_Ready] | None = None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._ahead is None:
            batches = self._maker.batches(self._places)
            if self._transfer is not None:
                batches = _started(batches, self._transfer)
            self._ahead = Prefetcher(batches, _BATCHES_AHEAD)
        try:
            ready = next(self._ahead)
        except StopIteration:
            raise DataExhausted(f"{self._mixture.name} is used up: {_epochs(self._mixture)}") from None
        except SourceFailed as error:
            raise SourceFailed(f"data-parallel rank {self._share.data_rank}: {error}") from error
        self._places = ready.after
        if self._transfer is not None and ready.travelling is not None:
            return self._transfer.take(ready.travelling)
        return ready.batch

    def from_start(self, most: int | None = None) -> Iterator[Batch]:
        """The first `most` batches of the data (None: all of an epoch, or of `data.epochs`), from its beginning.

        Ends where the data ends, on every rank after the same batch.
        """
        self._move(self._mixture.start)
        try:
            for _ in itertools.count() if most is None else range(most):
                try:
                    batch = next(self)
                except DataExhausted:
                    return
                yield batch
        finally:
            self.close()

    def state_dict(self) -> dict[str, Any]:
        """The position before the next batch: small, JSON-able, the same on every rank.

        To be taken between steps: a step that is resumed in its middle begins a new global batch there.
        """
        return self._mixture.state_dict(self._places)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at the position of `state`, which may be of another number of ranks or another batch size.

        Warns, naming what, if the data is not that which the position was taken in. Raises ConfigurationError if
        `state` is no position.
        """
        self._move(self._mixture.load_state_dict(state))

    @property
    def counts(self) -> DataCounts:
        """What was read for the batches before the next one."""
        members, places = self._mixture.members, self._places
        positions = sum(place.sequences for place in places) * self._mixture.packing.length
        tokens = {member.name: place.tokens for member, place in zip(members, places, strict=True)}
        bad = sum(place.bad_documents for place in places)
        return DataCounts(tokens, bad, sum(tokens.values()) / positions if positions else 1.0)

    def close(self) -> None:
        """End the thread that works ahead; the next batch starts another."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def _move(self, places: Places) -> None:
        self.close()
        self._places = places


@dataclass(frozen=True)
class _Maker:
    """Makes a rank's batches. Not the loader itself, which a thread that works for it must not hold."""

    mixture: Mixture
    share: Share
    mask_documents: bool
    workers: int

    def batches(self, places: Places) -> Iterator[_Ready]:
        """The rank's batches from `places` on, in whole global batches."""
        if not self.workers:
            yield from self._rounds(self.mixture.rows(places))
            return
        with Workers(self.mixture.members[0].stream.tokenizer, self.workers) as workers:
            yield from self._rounds(self.mixture.rows(places, workers.encode))

    def _rounds(self, rows: Iterator[tuple[Row, Places]]) -> Iterator[_Ready]:
        share, rounds = self.share, 0
        first = share.data_rank * share.batch_size
        after = None
        while together := list(itertools.islice(rows, share.sequences)):
            mine = [row for row, _ in together[first : first + share.batch_size]]
            _, after = together[-1]
            yield _Ready(self._batch(mine), after)
            rounds += 1
        for _ in range(-rounds % share.accumulation):
            assert after is not None
            yield _Ready(self._batch([]), after)

    def _batch(self, rows: list[Row]) -> Batch:
        """The sequences, filled up with end tokens, and more of these where there are not enough sequences."""
        import torch

        shape = self.share.batch_size, self.mixture.packing.length
        tokens = np.full(shape, self.mixture.members[0].stream.tokenizer.eos_id or 0, dtype=np.int64)
        labels = np.full(shape, IGNORE, dtype=np.int64)
        documents = np.zeros(shape, dtype=np.int32)
        joined = self.mixture.packing.kind == "cut" and not self.mask_documents
        for number, row in enumerate(rows):
            row.fill(tokens[number], labels[number], documents[number], joined=joined)
        _refuse_unknown(rows, tokens, self.mixture.members[0].stream.tokenizer.vocab_size)
        arrays = (tokens, labels, documents) if self.mask_documents else (tokens, labels)
        return Batch(*map(torch.from_numpy, arrays))


def _refuse_unknown(rows: list[Row], tokens: Tokens, vocabulary: int) -> None:
    """Raise SourceFailed for a token that the model has no embedding for: that of a damaged store, for instance."""
    if tokens.min() >= 0 and tokens.max() < vocabulary:
        return
    for part in (part for row in rows for part in row.parts):
        inputs = part.piece.tokens[: part.inputs]
        if part.inputs and (inputs.max() >= vocabulary or inputs.min() < 0):
            at = part.piece.start
            raise SourceFailed(
                f"document {at.document} of epoch {at.epoch} holds a token {inputs.max()}, the tokenizer has "
                f"{vocabulary}; is its file damaged, or of another tokenizer?"
            )


def _epochs(mixture: Mixture) -> str:
    if len(mixture.members) > 1:
        return "the epochs and limits of all sources are over"
    return f"{mixture.members[0].stream.epochs} epoch(s), as data.epochs says"


def _transfer_to(device: torch.device | None) -> Transfer | None:
    if device is None:
        return None
    from trainer.data.device import Transfer

    return Transfer(device)


def _started(batches: Iterator[_Ready], transfer: Transfer) -> Iterator[_Ready]:
    """The same batches, on their way to the device."""
    for ready in batches:
        yield replace(ready, travelling=transfer.start(ready.batch))
