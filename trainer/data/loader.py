"""Batches of a data-parallel rank, cut from one global sequence of sequences, and a position that resumes it.

With b = batch size, R = data-parallel ranks and A = accumulation steps, global batch k is the sequences
[k b R A, (k + 1) b R A) of the packed stream. They are taken in A rounds of b R sequences; rank r gets the r-th b
of each round. So step k holds the same tokens for every R with the same b R A, and the position, which is that of
the first token of the next round, has the same meaning for all of them.

Each rank tokenizes the whole stream and keeps its share: where a sequence begins depends on all before it.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.data.errors import DataExhausted, SourceFailed
from trainer.data.packing import Window, windows
from trainer.data.prefetch import Prefetcher
from trainer.data.sources import open_source
from trainer.data.stream import Position, TokenStream
from trainer.data.tokenizer import Tokenizer
from trainer.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

    from trainer.config.schema import Config
    from trainer.data.device import Transfer, Travelling

_log = logging.getLogger(__name__)

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

    seq_len: int
    batch_size: int
    data_rank: int = 0
    data_ranks: int = 1
    accumulation: int = 1

    @property
    def round_tokens(self) -> int:
        """The inputs of all ranks in one round."""
        return self.batch_size * self.data_ranks * self.seq_len


@dataclass(frozen=True)
class _Ready:
    batch: Batch
    after: Position
    travelling: Travelling | None = None  # where batches go to a device


class Loader:
    """The batches of one rank, one after the other, made ahead by a thread.

    `next(loader)` gives a Batch, A of which make a step. Where the stream ends, the last global batch is filled
    up with labels IGNORE, on every rank alike; the step after it raises DataExhausted on all of them.

    With `mask_documents`, batches say which document each token belongs to. With `device` they are on it, copied there
    ahead.
    """

    def __init__(
        self,
        stream: TokenStream,
        share: Share,
        *,
        mask_documents: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self._stream = stream
        self._share = share
        self._mask_documents = mask_documents
        self._position = Position()
        self._transfer = _transfer_to(device)
        self._ahead: Prefetcher[_Ready] | None = None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._ahead is None:
            batches = _batches(self._stream, self._share, self._position, self._mask_documents)
            if self._transfer is not None:
                batches = _started(batches, self._transfer)
            self._ahead = Prefetcher(batches, _BATCHES_AHEAD)
        try:
            ready = next(self._ahead)
        except StopIteration:
            raise DataExhausted(
                f"{self._stream.source.name} is used up: {self._stream.epochs} epoch(s), as data.epochs says"
            ) from None
        except SourceFailed as error:
            raise SourceFailed(f"data-parallel rank {self._share.data_rank}: {error}") from error
        self._position = ready.after
        if self._transfer is not None and ready.travelling is not None:
            return self._transfer.take(ready.travelling)
        return ready.batch

    def from_start(self, most: int | None = None) -> Iterator[Batch]:
        """The first `most` batches of the data (None: all of an epoch, or of `data.epochs`), from its beginning.

        Ends where the data ends, on every rank after the same batch.
        """
        self._move(Position())
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
        at = self._position
        return {
            "epoch": at.epoch,
            "document": at.document,
            "offset": at.offset,
            "stream": self._stream.describe(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at the position of `state`, which may be of another number of ranks or another batch size.

        Warns, naming what, if data, tokenizer, seed or order are not those that the position was taken in: tokens
        may then be repeated or left out. Raises ConfigurationError if `state` is no position.
        """
        numbers = [state.get(key) for key in ("epoch", "document", "offset")]
        if not all(isinstance(number, int) and number >= 0 for number in numbers):
            raise ConfigurationError(f"the checkpoint's data state is no position in the data: {dict(state)}")
        then, now = state.get("stream") or {}, self._stream.describe()
        changed = [key for key in now if then.get(key) != now[key]]
        if changed:
            _log.warning(
                "%s: %s changed since the checkpoint, so its position in the data (epoch %d, document %d) means "
                "other text now; some may be repeated or left out",
                *(self._stream.source.name, " and ".join(changed), state["epoch"], state["document"]),
            )
        self._move(Position(state["epoch"], state["document"], state["offset"]))

    def close(self) -> None:
        """End the thread that works ahead; the next batch starts another."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def _move(self, position: Position) -> None:
        self.close()
        self._position = position


def build_loader(
    config: Config,
    tokenizer: Tokenizer,
    *,
    data_rank: int,
    data_ranks: int,
    validation: bool = False,
    device: torch.device | None = None,
) -> Loader:
    """The loader of a data-parallel rank for `[training]`, or for `[validation]`: one epoch, in order; its batches
    are on `device`.

    Keys of `[validation]` that are unset are those of `[training]`. Raises ConfigurationError if the data cannot
    be opened, or if global_batch_size is no multiple of batch_size times `data_ranks`.
    """
    training, data = config.training, config.data
    if validation:
        checked = config.validation
        own = checked.dataset is not None or checked.dataset_path is not None
        source = open_source(
            checked.dataset or training.dataset,
            checked.dataset_path if own else training.dataset_path,
            training.text_column,
        )
        stream = TokenStream(source, tokenizer, add_bos=data.add_bos, add_eos=data.add_eos, epochs=1)
        batch_size, seq_len = checked.batch_size or training.batch_size, checked.seq_len or training.seq_len
        share = Share(seq_len, batch_size, data_rank, data_ranks)
        return Loader(stream, share, mask_documents=data.mask_documents, device=device)
    source = open_source(training.dataset, training.dataset_path, training.text_column)
    stream = TokenStream(
        source, tokenizer, data.shuffle, training.seed, data.add_bos, data.add_eos, epochs=data.epochs
    )
    accumulation = accumulation_steps(training.global_batch_size, training.batch_size, data_ranks)
    share = Share(training.seq_len, training.batch_size, data_rank, data_ranks, accumulation)
    return Loader(stream, share, mask_documents=data.mask_documents, device=device)


def accumulation_steps(global_batch_size: int | None, batch_size: int, data_ranks: int) -> int:
    """How many batches of each rank make a global batch; 1 if `global_batch_size` is unset."""
    if global_batch_size is None:
        return 1
    steps, rest = divmod(global_batch_size, batch_size * data_ranks)
    if rest or not steps:
        raise ConfigurationError(
            f"training.global_batch_size {global_batch_size} is not a multiple of {batch_size * data_ranks}: "
            f"training.batch_size {batch_size} on each of {data_ranks} data-parallel ranks"
        )
    return steps


def _batches(stream: TokenStream, share: Share, start: Position, mask_documents: bool) -> Iterator[_Ready]:
    """The rank's batches from `start` on, in whole global batches."""
    rounds = 0
    for window in windows(stream.pieces(start), share.round_tokens):
        batch = _batch(window, share, stream.tokenizer, mask_documents)
        yield _Ready(batch, window.after or stream.end)
        rounds += 1
    nothing = np.empty(0, dtype=np.int32)
    for _ in range(-rounds % share.accumulation):
        batch = _batch(Window(nothing, nothing, None), share, stream.tokenizer, mask_documents)
        yield _Ready(batch, stream.end)


def _transfer_to(device: torch.device | None) -> Transfer | None:
    if device is None:
        return None
    from trainer.data.device import Transfer

    return Transfer(device)


def _started(batches: Iterator[_Ready], transfer: Transfer) -> Iterator[_Ready]:
    """The same batches, on their way to the device."""
    for ready in batches:
        yield replace(ready, travelling=transfer.start(ready.batch))


def _batch(window: Window, share: Share, tokenizer: Tokenizer, mask_documents: bool) -> Batch:
    """This rank's part of a round. Where the round is not full, inputs are the end token, a document of their own."""
    import torch

    b, t = share.batch_size, share.seq_len
    mine = slice(share.data_rank * b * t, (share.data_rank + 1) * b * t + 1)
    part, owners = window.tokens[mine], window.documents[mine]
    inputs = part[: b * t]
    tokens = np.full(b * t, tokenizer.eos_id or 0, dtype=np.int64)
    labels = np.full(b * t, IGNORE, dtype=np.int64)
    tokens[: len(inputs)] = inputs
    labels[: max(0, len(part) - 1)] = part[1:]
    if not mask_documents:
        return Batch(torch.from_numpy(tokens.reshape(b, t)), torch.from_numpy(labels.reshape(b, t)))
    labels[: max(0, len(part) - 1)][owners[1:] != owners[:-1]] = IGNORE
    documents = np.full(b * t, owners[-1] + 1 if len(owners) else 0, dtype=np.int32)
    documents[: len(inputs)] = owners[: b * t]
    by_sequence = documents.reshape(b, t) - documents.reshape(b, t)[:, :1]
    return Batch(
        torch.from_numpy(tokens.reshape(b, t)),
        torch.from_numpy(labels.reshape(b, t)),
        torch.from_numpy(by_sequence),
    )
