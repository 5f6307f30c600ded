"""Prepare data for training: train a tokenizer on a corpus.

stageline prepare --train-tokenizer --vocab-size 32000 --dataset text --dataset-path books/ --output tokenizers/books
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from trainer.errors import ExitCode, StagelineError

_MEGABYTE = 1_000_000
_LARGEST_VOCABULARY = 10_000_000


def run(argv: list[str]) -> int:
    """Carry out `stageline prepare` and return its exit code: 2 if an argument or the data named there is wrong."""
    arguments = _parser().parse_args(argv)
    # The libraries of the data take seconds to load; --help and wrong arguments need none.
    from trainer.data.sources import open_source
    from trainer.data.tokenizer import load_tokenizer, train_sentencepiece
    from trainer.data.tokenizer_training import sample

    try:
        source = open_source(arguments.dataset, arguments.dataset_path, arguments.text_column)
        size = int(arguments.sample_megabytes * _MEGABYTE)
        print(f"training a tokenizer of {arguments.vocab_size} tokens on {source.name}", flush=True)
        file = train_sentencepiece(sample(source, size), arguments.vocab_size, Path(arguments.output))
        vocab_size = load_tokenizer(file).vocab_size
    except StagelineError as error:
        print(f"stageline prepare: {error}", file=sys.stderr)
        return error.exit_code
    print(f"wrote {file} ({vocab_size} tokens); use it with --model.tokenizer_path {file}")
    return ExitCode.DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stageline prepare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--train-tokenizer",
        action="store_true",
        required=True,
        help="train a sentencepiece model (byte-pair encoding; every text comes back as it was)",
    )
    parser.add_argument(
        "--vocab-size", type=_vocab_size, required=True, metavar="N", help="tokens of the model"
    )
    parser.add_argument(
        "--dataset",
        default="python_docs",
        help="as training.dataset: python_docs (default), text, jsonl, parquet, arrow, or a hub data set",
    )
    parser.add_argument(
        "--dataset-path", metavar="PATH", help="as training.dataset_path: a file, folder or pattern"
    )
    parser.add_argument("--text-column", default="text", metavar="NAME", help="of tables (default: text)")
    parser.add_argument("--output", required=True, metavar="FOLDER", help="gets tokenizer.model")
    parser.add_argument(
        "--sample-megabytes",
        type=_positive,
        default=100.0,
        metavar="MB",
        help="train on documents of at most so many million characters, spread over the corpus (default: 100)",
    )
    return parser


def _vocab_size(text: str) -> int:
    value = int(text)
    if not 0 < value <= _LARGEST_VOCABULARY:
        raise argparse.ArgumentTypeError(f"{value} is not between 1 and {_LARGEST_VOCABULARY}")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value
