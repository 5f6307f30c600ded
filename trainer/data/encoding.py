"""Texts to token ids, many at a time: in this process, or ahead in workers whose results come in the same order.

A worker is a program of its own (`trainer.data.encoding_worker`) that loads the tokenizer and nothing else, so that
neither a fork of a process with threads nor a second import of torch is needed. It ends when its pipe does: with the
rank, however that ends. A worker that dies closes the pipe, which its reader sees at once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainer.data.errors import SourceFailed
from trainer.data.sources import Segment, Text
from trainer.data.tokenizer import Tokenizer

ENCODED_AHEAD = 64_000
"""Characters. Documents are encoded together until they hold so many: enough to save the cost of each call, little
enough that the step does not wait long for it."""

Ids = npt.NDArray[np.int32]
Learned = npt.NDArray[np.bool_]

_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class GroupedDocument:
    """A document of a group: whether it is bad, and its segments, where it is more than one text."""

    bad: bool
    segments: tuple[Segment, ...] | None


@dataclass(frozen=True)
class Group:
    """Documents that are encoded together, and all their texts one after the other."""

    documents: tuple[GroupedDocument, ...]
    texts: tuple[str, ...]


Encoded = tuple[Group, list[tuple[Ids, Learned | None]]]
"""A group, and of each document the ids, and which of them are learned (None: all)."""
Encode = Callable[[Iterable[Group]], Iterator[Encoded]]


def groups(texts: Iterable[Text], is_bad: Callable[[Text], bool]) -> Iterator[Group]:
    """The documents in groups of about ENCODED_AHEAD characters."""
    documents: list[GroupedDocument] = []
    held: list[str] = []
    size = 0
    for text in texts:
        segments = None if isinstance(text, str) else text
        parts = [str(text)] if isinstance(text, str) else [part.text for part in text if part.token is None]
        documents.append(GroupedDocument(is_bad(text), segments))
        held += parts
        # An empty document counts too, so that a source of nothing else does not gather for ever.
        size += sum(map(len, parts)) + 1
        if size >= ENCODED_AHEAD:
            yield Group(tuple(documents), tuple(held))
            documents, held, size = [], [], 0
    if documents:
        yield Group(tuple(documents), tuple(held))


def encode_here(tokenizer: Tokenizer) -> Encode:
    """Encode in the thread that asks."""

    def encode(found: Iterable[Group]) -> Iterator[Encoded]:
        for group in found:
            arrays = [np.array(ids, dtype=np.int32) for ids in tokenizer.encode_batch(group.texts)]
            yield group, _by_document(group, arrays)

    return encode


class Workers:
    """Processes that encode groups, each one at a time; used by one thread."""

    def __init__(self, tokenizer: Tokenizer, count: int) -> None:
        self._workers = [_Worker(tokenizer, number) for number in range(count)]
        self._next = 0

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.close()

    def encode(self, found: Iterable[Group]) -> Iterator[Encoded]:
        """As `encode_here`, with as many groups ahead as there are workers. Raises SourceFailed if one dies."""
        waiting: deque[tuple[Group, _Ticket]] = deque()
        for group in found:
            worker = self._workers[self._next]
            self._next = (self._next + 1) % len(self._workers)
            waiting.append((group, worker.submit(group.texts)))
            if len(waiting) >= len(self._workers):
                yield self._oldest(waiting)
        while waiting:
            yield self._oldest(waiting)

    def _oldest(self, waiting: deque[tuple[Group, _Ticket]]) -> Encoded:
        group, ticket = waiting.popleft()
        return group, _by_document(group, ticket.result())


@dataclass
class _Ticket:
    worker: _Worker
    arrays: list[Ids] | None = None

    def result(self) -> list[Ids]:
        if self.arrays is None:
            self.worker.receive()
        assert self.arrays is not None
        return self.arrays


class _Worker:
    def __init__(self, tokenizer: Tokenizer, number: int) -> None:
        self._number = number
        self._connection, theirs = Pipe()
        self._ticket: _Ticket | None = None
        path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        # The workers are the parallelism; threads of the tokenizer's own would take the cores of other ranks.
        environment = os.environ | {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-m", "trainer.data.encoding_worker", str(theirs.fileno())]
        self._process = subprocess.Popen(
            [*command, str(tokenizer.file)],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=environment,
        )
        theirs.close()

    def submit(self, texts: tuple[str, ...]) -> _Ticket:
        """Hand over texts. One group at a time: with two, both ends could wait for each other to read."""
        if self._ticket is not None:
            self.receive()
        ticket = _Ticket(self)
        try:
            self._connection.send(texts)
        except OSError as error:
            raise self._dead() from error
        self._ticket = ticket
        return ticket

    def receive(self) -> None:
        """The result of what was handed over last."""
        assert self._ticket is not None
        try:
            lengths, ids = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._dead() from error
        self._ticket.arrays = np.split(ids, np.cumsum(lengths)[:-1]) if len(lengths) else []
        self._ticket = None

    def close(self) -> None:
        self._connection.close()
        self._process.terminate()
        self._process.wait()

    def _dead(self) -> SourceFailed:
        code = self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return SourceFailed(f"data worker {self._number} (process {self._process.pid}) {how}")


def serve(connection: Connection, tokenizer: Tokenizer) -> None:
    """Encode what comes until the pipe ends."""
    while True:
        try:
            texts = connection.recv()
            encoded = tokenizer.encode_batch(texts)
            ids = np.fromiter((i for each in encoded for i in each), dtype=np.int32)
            connection.send((np.array([len(each) for each in encoded], dtype=np.int64), ids))
        except (EOFError, OSError):
            return


def _by_document(group: Group, arrays: list[Ids]) -> list[tuple[Ids, Learned | None]]:
    found: list[tuple[Ids, Learned | None]] = []
    texts = iter(arrays)
    for document in group.documents:
        if document.segments is None:
            found.append((next(texts), None))
            continue
        parts = [
            next(texts) if part.token is None else np.array([part.token], dtype=np.int32)
            for part in document.segments
        ]
        flags = [np.full(len(ids), s.learned) for ids, s in zip(parts, document.segments, strict=True)]
        found.append(
            (np.concatenate([*parts, np.empty(0, np.int32)]), np.concatenate([*flags, np.empty(0, bool)]))
        )
    return found
