"""Units of a corpus to tokens: in this process, or in several, always in the order of the units."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from trainer.data.corpus import Bad, Unit
from trainer.data.tokenizer import Tokenizer, load_tokenizer
from trainer.data.tokenizer_formats import SentencePieceTokenizer
from trainer.errors import StagelineError

_AHEAD_PER_WORKER = 2
_ENCODED_TOGETHER = 64_000  # characters: enough to save the cost of each call of the library
_PRELOADED = ["__main__", "trainer.data.tokenizing", "trainer.data.tokenizer_formats"]


@dataclass(frozen=True)
class Encoding:
    """How documents become tokens."""

    tokenizer: str | Path
    add_bos: bool
    add_eos: bool
    item_size: int  # bytes of a token: 2 or 4


@dataclass(frozen=True)
class Encoded:
    """The documents of a unit: their tokens one after the other, as bytes, and how many each has."""

    tokens: bytes
    lengths: array[int]
    bad: tuple[Bad, ...]
    size: int  # bytes of the corpus


class WorkerDied(StagelineError):
    """A process that tokenizes is gone."""


class Encoder:
    """Tokenizes units, with one tokenizer that is loaded once."""

    def __init__(self, encoding: Encoding) -> None:
        # One thread: there is a process for each core.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        tokenizer = load_tokenizer(encoding.tokenizer)
        self._encode_texts = _fastest(tokenizer)
        bos, eos = tokenizer.bos_id, tokenizer.eos_id
        self._begin = [bos] if encoding.add_bos and bos is not None else []
        self._end = [eos] if encoding.add_eos and eos is not None else []
        self._type = "H" if encoding.item_size == 2 else "I"

    def __call__(self, unit: Unit) -> Encoded:
        tokens, lengths, bad = array(self._type), array("Q"), []
        texts: list[str] = []
        held = 0
        for document in unit.documents():
            if document.bad is not None:
                bad.append(document.bad)
            if document.counts:
                texts.append(document.text)
                held += len(document.text)
            if held >= _ENCODED_TOGETHER:
                self._encode(texts, tokens, lengths)
                texts, held = [], 0
        self._encode(texts, tokens, lengths)
        return Encoded(tokens.tobytes(), lengths, tuple(bad), unit.size)

    def _encode(self, texts: list[str], tokens: array[int], lengths: array[int]) -> None:
        for ids in self._encode_texts(texts):
            if ids:
                tokens.extend(self._begin)
                tokens.fromlist(ids)
                tokens.extend(self._end)
            lengths.append(len(self._begin) + len(ids) + len(self._end) if ids else 0)


def _fastest(tokenizer: Tokenizer) -> Callable[[Sequence[str]], list[list[int]]]:
    """How texts are encoded fastest where no other thread works.

    sentencepiece starts threads for each batch, a tenth of its time. Beside a thread that trains it is the other way
    round: one text after the other waits each time for the interpreter.
    """
    if isinstance(tokenizer, SentencePieceTokenizer):
        return lambda texts: [tokenizer.encode(text, bos=False, eos=False) for text in texts]
    return tokenizer.encode_batch


def encode_units(units: Iterator[Unit], encoding: Encoding, workers: int) -> Iterator[Encoded]:
    """Tokenize the units with so many processes, this one if it is 1; a bounded number of units is under way.

    The processes end with the iterator, and with this process, however that ends. Raises WorkerDied if one of them
    ends before its time.
    """
    if workers == 1:
        yield from map(Encoder(encoding), units)
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    pool = ProcessPoolExecutor(workers, context, _start, (encoding,))
    under_way: deque[Future[Encoded]] = deque()
    try:
        for unit in units:
            under_way.append(pool.submit(_encode, unit))
            if len(under_way) >= _AHEAD_PER_WORKER * workers:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    except BrokenProcessPool as error:
        raise WorkerDied(
            "a process that tokenizes was ended from outside, most likely for want of memory; "
            "run the same command again to go on, perhaps with fewer --workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_encoder: Encoder


def _start(encoding: Encoding) -> None:
    """Once in each process of the pool."""
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's business, which then ends the pool
    threading.Thread(target=_end_with_parent, name="stageline-parent", daemon=True).start()
    _encoder = Encoder(encoding)


def _encode(unit: Unit) -> Encoded:
    return _encoder(unit)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None  # this is a process of a pool
    parent.join()
    os._exit(1)
