"""The text of --help, generated from the classes of the schema."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from trainer.config.describe import allowed, default, tables

_WIDTH = 100
_HEAD = """\
Usage: ./run_train.sh [--config FILE] [--table.key VALUE ...]

Trains the model that a TOML file describes. Values on the command line go before those in the file.

  ./run_train.sh
  ./run_train.sh --config llama_8b.toml --training.batch_size 2 --training.steps 1000
  NGPU=4 ./run_train.sh --experimental.pipeline_parallel_degree 4 --profiling.pipeline_timeline_steps '[3]'

  --config FILE   a path, or a name in train_configs/ (default: debug.toml)
  --help          this text

A list is written as in TOML: '[3, 5]'. A boolean is true or false; alone, --table.key means true.
A key that can be unset is unset by none.
"""


def render_help() -> str:
    """Every table and key with its type, default and meaning."""
    return "\n".join([_HEAD, *_tables()])


def _tables() -> Iterator[str]:
    for table, kind in tables().items():
        yield f"[{table}] {' '.join((kind.__doc__ or '').split())}"
        for key, field in kind.model_fields.items():
            yield f"  --{table}.{key}   {allowed(field)} (default: {default(field)})"
            yield textwrap.fill(
                " ".join((field.description or "").split()),
                _WIDTH,
                initial_indent=" " * 6,
                subsequent_indent=" " * 6,
            )
        yield ""
