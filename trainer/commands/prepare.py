"""Prepare data for training: tokenize a corpus once into a token store, or train a tokenizer on it.

stageline prepare --tokenizer llama/tokenizer.json --dataset jsonl --dataset-path corpus/ --output stores/corpus
stageline prepare --train-tokenizer --vocab-size 32000 --dataset text --dataset-path books/ --output tokenizers/books
stageline prepare --verify stores/corpus

A store is read with training.dataset = "store" and training.dataset_path = "stores/corpus". Interrupted at any moment,
the same command goes on where it was and makes the same store.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from trainer.errors import ExitCode, StagelineError

_MEGABYTE = 1_000_000
_LARGEST_VOCABULARY = 10_000_000
_MOST_WORKERS = 4096


def run(argv: list[str]) -> int:
    """Carry out `stageline prepare` and return its exit code: 2 if an argument or the data named there is wrong, 3 if
    it was interrupted, 1 if a store is damaged or a bad document stops it."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.verify is None and arguments.output is None:
        parser.error("the following arguments are required: --output")
    if arguments.train_tokenizer and arguments.vocab_size is None:
        parser.error("the following arguments are required with --train-tokenizer: --vocab-size")
    try:
        if arguments.verify is not None:
            return _verify(arguments.verify)
        if arguments.train_tokenizer:
            return _train(arguments)
        from trainer.data.preparation_console import prepare_store

        return prepare_store(arguments)
    except StagelineError as error:
        print(f"stageline prepare: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"stageline prepare: {error.filename or arguments.output}: {error.strerror}", file=sys.stderr)
        return ExitCode.OTHER


def _train(arguments: argparse.Namespace) -> int:
    # The libraries of the data take seconds to load; --help and wrong arguments need none.
    from trainer.data.sources import open_source
    from trainer.data.tokenizer import load_tokenizer, train_sentencepiece
    from trainer.data.tokenizer_training import sample

    source = open_source(arguments.dataset, arguments.dataset_path, arguments.text_column)
    size = int(arguments.sample_megabytes * _MEGABYTE)
    print(f"training a tokenizer of {arguments.vocab_size} tokens on {source.name}", flush=True)
    file = train_sentencepiece(sample(source, size), arguments.vocab_size, Path(arguments.output))
    vocab_size = load_tokenizer(file).vocab_size
    print(f"wrote {file} ({vocab_size} tokens); use it with --model.tokenizer_path {file}")
    return ExitCode.DONE


def _verify(folder: str) -> int:
    from trainer.data.store import open_store

    store = open_store(folder)
    damaged = list(store.damaged_files())
    for file in damaged:
        print(f"{file}: damaged", file=sys.stderr)
    if damaged:
        return ExitCode.OTHER
    print(f"{folder}: whole, {len(store):,} documents, {store.total_tokens:,} tokens")
    return ExitCode.DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stageline prepare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument(
        "--tokenizer",
        metavar="T",
        help='make a token store with this tokenizer: a file or folder as in model.tokenizer_path, or "byte"',
    )
    task.add_argument(
        "--train-tokenizer",
        action="store_true",
        help="train a sentencepiece model (byte-pair encoding; every text comes back as it was)",
    )
    task.add_argument("--verify", metavar="STORE", help="read all of a store and compare its checksums")
    parser.add_argument("--output", metavar="FOLDER", help="gets the store, or tokenizer.model")
    parser.add_argument(
        "--dataset",
        default="python_docs",
        help="as training.dataset: python_docs (default), text, jsonl, parquet, arrow, or a hub data set",
    )
    parser.add_argument(
        "--dataset-path", metavar="PATH", help="as training.dataset_path: a file, folder or pattern"
    )
    parser.add_argument("--text-column", default="text", metavar="NAME", help="of tables (default: text)")
    _add_store(parser.add_argument_group("a token store"))
    tokenizer = parser.add_argument_group("a tokenizer")
    tokenizer.add_argument("--vocab-size", type=_vocab_size, metavar="N", help="tokens of the model")
    tokenizer.add_argument(
        "--sample-megabytes",
        type=_positive,
        default=100.0,
        metavar="MB",
        help="train on documents of at most so many million characters, spread over the corpus (default: 100)",
    )
    return parser


def _add_store(store: argparse._ArgumentGroup) -> None:
    cores = len(os.sched_getaffinity(0))
    store.add_argument(
        "--workers",
        type=_number_up_to(_MOST_WORKERS),
        default=cores,
        metavar="N",
        help=f"processes that tokenize (default: the cores that may be used, here {cores})",
    )
    store.add_argument(
        "--on-error",
        choices=("skip", "stop"),
        default="skip",
        help="at documents that are empty, broken or unreadable: leave them out (broken UTF-8: put U+FFFD), count and "
        "list them (skip, the default), or stop at the first",
    )
    store.add_argument("--no-bos", action="store_true", help="for training with data.add_bos = false")
    store.add_argument("--no-eos", action="store_true", help="for training with data.add_eos = false")
    store.add_argument(
        "--shard-tokens",
        type=_number_up_to(1 << 40),
        default=1 << 28,
        metavar="N",
        help="a shard ends with the document that makes it so long (default: 268,435,456)",
    )


def _vocab_size(text: str) -> int:
    return _number_up_to(_LARGEST_VOCABULARY)(text)


class _number_up_to:  # noqa: N801  # argparse calls it by name in its own messages
    def __init__(self, largest: int) -> None:
        self._largest = largest
        self.__name__ = "number"

    def __call__(self, text: str) -> int:
        value = int(text)
        if not 0 < value <= self._largest:
            raise argparse.ArgumentTypeError(f"{value} is not between 1 and {self._largest}")
        return value


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value
