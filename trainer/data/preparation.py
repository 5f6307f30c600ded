"""From a corpus to a token store: the whole of `stageline prepare --tokenizer`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from trainer.data.corpora import Corpus
from trainer.data.corpus import Bad
from trainer.data.store_format import Metadata, Recipe
from trainer.data.store_writer import StoreWriter
from trainer.data.tokenizer import BYTE, load_tokenizer, tokenizer_files
from trainer.data.tokenizing import Encoding, encode_units
from trainer.errors import ExitCode, StagelineError

SHARD_TOKENS = 1 << 28


class OnError(StrEnum):
    """What a bad document leads to."""

    SKIP = "skip"
    STOP = "stop"


class BadDocument(StagelineError):
    """A document is bad and the policy is to stop there."""

    exit_code = ExitCode.WRONG_CONFIGURATION

    def __init__(self, bad: Bad) -> None:
        super().__init__(str(bad))
        self.bad = bad


@dataclass(frozen=True)
class Preparation:
    """What to make. `text_column` is part of the corpus already, and recorded."""

    corpus: Corpus
    tokenizer: str | Path
    output: Path
    workers: int = 1
    text_column: str = "text"
    add_bos: bool = True
    add_eos: bool = True
    shard_tokens: int = SHARD_TOKENS
    on_error: OnError = OnError.SKIP


@dataclass(frozen=True)
class Sofar:
    """How far it is, after a unit."""

    size: int  # bytes of the corpus, in this run
    documents: int
    tokens: int
    bad: tuple[Bad, ...]  # of this unit


@dataclass(frozen=True)
class Prepared:
    """What was made; `tokens` and `seconds` are of this run alone, which may have gone on with an earlier one."""

    metadata: Metadata
    resumed_at: int  # documents that were there
    tokens: int
    seconds: float


def prepare(wanted: Preparation, report: Callable[[Sofar], None] = lambda _: None) -> Prepared:
    """Make the store, or go on making it; returns at once if it is there already.

    The bytes depend on the corpus, the tokenizer, ends and size of a shard, and not on workers or interruptions.
    Raises ConfigurationError for a folder that holds something else and a corpus without text, BadDocument as the
    policy says, WorkerDied; whatever ends it, the next call goes on from at most seconds before.
    """
    tokenizer = load_tokenizer(wanted.tokenizer)
    recipe = Recipe(
        source=wanted.corpus.name,
        source_fingerprint=wanted.corpus.fingerprint,
        text_column=wanted.text_column,
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        add_bos=wanted.add_bos,
        add_eos=wanted.add_eos,
        shard_tokens=wanted.shard_tokens,
    )
    encoding = Encoding(wanted.tokenizer, wanted.add_bos, wanted.add_eos, recipe.dtype.itemsize)
    began = time.monotonic()
    with StoreWriter(wanted.output, recipe) as store:
        if store.finished is not None:
            return Prepared(store.finished, store.finished.documents, 0, 0.0)
        before, tokens_before = store.documents, store.tokens
        units = wanted.corpus.units(store.units, before)
        try:
            for encoded in encode_units(units, encoding, wanted.workers):
                if encoded.bad and wanted.on_error is OnError.STOP:
                    raise BadDocument(encoded.bad[0])
                store.add(encoded)
                report(Sofar(encoded.size, store.documents, store.tokens, encoded.bad))
        except (BadDocument, KeyboardInterrupt):
            store.commit()
            raise
        metadata = store.finish(tokenizer_files(wanted.tokenizer) if wanted.tokenizer != BYTE else ())
    seconds = time.monotonic() - began
    return Prepared(metadata, before, metadata.tokens - tokens_before, seconds)
