"""Tokens per second of `stageline prepare` against the tokenizer's library alone in a loop over the same texts.

    python benchmarks/prepare.py [--megabytes 30] [--repeats 3] [--workers 1 2]

The loop holds all texts in memory and encodes one after the other, on one core, without keeping anything. Prepare reads
them from JSON lines and leaves a store with index and checksums. Both tokenize the text that ships with Python; loop
and prepare take turns, the best of each counts. Wanted: at least 0.9 of the loop for each core. "processor" compares
the seconds of the processor with one worker, which is in this process: on a machine that others use too, the figure to
trust.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from trainer.data.corpora import open_corpus
from trainer.data.preparation import Preparation, prepare
from trainer.data.sources import open_source
from trainer.data.tokenizer_training import train_sentencepiece

_PER_DOCUMENT = 4_000  # characters, about a page of the web


@dataclass(frozen=True)
class Library:
    """A tokenizer's library: its file, and how it alone encodes a text."""

    name: str
    file: Path
    encode: Callable[[str], Sequence[int]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    texts = list(_texts(int(arguments.megabytes * 1e6)))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = folder / "corpus.jsonl"
        with corpus.open("w") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
        print(f"{len(texts):,} documents, {corpus.stat().st_size / 1e6:.0f} MB of JSON lines")
        columns = ["tokens/s", "ratio", "per core"]
        print(
            f"{'library':16}{'loop':>12}"
            + "".join(f"{w} x {c}".rjust(14) for w in arguments.workers for c in columns)
            + "processor".rjust(12)
        )
        for library in _libraries(folder, texts):
            _compare(library, texts, corpus, folder / "store", arguments.workers, arguments.repeats)


def _compare(
    library: Library, texts: list[str], corpus: Path, output: Path, workers: list[int], repeats: int
) -> None:
    loop = loop_processor = own_processor = 0.0
    prepared = dict.fromkeys(workers, 0.0)
    for _ in range(repeats):
        began, processor = time.perf_counter(), time.process_time()
        count = sum(len(library.encode(text)) for text in texts)
        loop = max(loop, count / (time.perf_counter() - began))
        loop_processor = max(loop_processor, count / (time.process_time() - processor))
        for number in workers:
            processor = time.process_time()
            prepared[number] = max(prepared[number], count / _seconds(library.file, corpus, output, number))
            if number == 1:
                own_processor = max(own_processor, count / (time.process_time() - processor))
    row = f"{library.name:16}{loop:12,.0f}"
    for number, speed in prepared.items():
        row += f"{speed:14,.0f}{speed / loop:14.2f}{speed / loop / number:14.2f}"
    print(f"{row}{own_processor / loop_processor:12.2f}", flush=True)


def _seconds(tokenizer: Path, corpus: Path, output: Path, workers: int) -> float:
    """From the opening of the corpus to the finished store, with the start of the processes."""
    shutil.rmtree(output, ignore_errors=True)
    began = time.perf_counter()
    prepare(Preparation(open_corpus("jsonl", str(corpus), "text"), tokenizer, output, workers))
    return time.perf_counter() - began


def _texts(size: int) -> Iterator[str]:
    source = open_source("python_docs")
    held = ""
    for index in range(len(source)):  # type: ignore[arg-type]
        held += source.read(index)  # type: ignore[union-attr]
        if len(held) >= _PER_DOCUMENT:
            size -= len(held)
            yield held
            held = ""
        if size <= 0:
            return


def _libraries(folder: Path, texts: list[str]) -> Iterator[Library]:
    from sentencepiece import SentencePieceProcessor

    sample = texts[:: max(1, len(texts) // 1000)]
    model = train_sentencepiece(sample, 8_000, folder / "sentencepiece")
    sentencepiece = SentencePieceProcessor(model_file=str(model))
    yield Library("sentencepiece", model, sentencepiece.encode)

    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=32_000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(sample, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    yield Library("tokenizers", folder / "tokenizer.json", lambda text: tokenizer.encode(text).ids)


if __name__ == "__main__":
    main()
