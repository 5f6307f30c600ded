"""Data sets of the Hugging Face hub by name, or of a local folder in a layout of its, as a stream.

The position in the stream is the number of documents read; resuming skips so many. A stream that breaks is
opened again at the document where it broke, a bounded number of times in a row, waiting longer each time. The
first connection is tried again by the library itself (huggingface_hub: five times within half a minute).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.data.errors import SourceFailed
from trainer.data.quiet import quiet_datasets
from trainer.data.sources import LOCAL, FlawedText, StreamingSource
from trainer.data.tables import check_text_column, root_cause
from trainer.errors import ConfigurationError

_log = logging.getLogger(__name__)

RETRY_WAITS = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds before each new attempt, after failures in a row."""


@dataclass(frozen=True)
class HubName:
    """What of the hub is meant: "owner/name", "owner/name:config", "owner/name@split", or all of them."""

    path: str
    config: str | None = None
    split: str = "train"

    @classmethod
    def parse(cls, name: str) -> HubName:
        if name in _TORCHTITAN_NAMES:
            return _TORCHTITAN_NAMES[name]
        rest, _, split = name.partition("@")
        path, _, config = rest.partition(":")
        return cls(path, config or None, split or "train")

    def __str__(self) -> str:
        return f"{self.path}{f':{self.config}' if self.config else ''}@{self.split}"


_TORCHTITAN_NAMES = {
    "c4": HubName("allenai/c4", "en"),
    "c4_validation": HubName("allenai/c4", "en", "validation"),
    "c4_test": HubName("tests/assets/c4_test"),
}


class HubSource(StreamingSource):
    """The rows of one split, in order, each read over the network when its turn comes."""

    def __init__(self, name: str, rows: Any, text_column: str, waits: Sequence[float] = RETRY_WAITS) -> None:
        """`rows` is a datasets.IterableDataset; `waits` are the seconds before each attempt after a failure."""
        if rows.features is not None:
            check_text_column(name, rows.features, text_column)
        self.name = name
        self.fingerprint = name
        self._rows = rows
        self._column = text_column
        self._waits = tuple(waits)

    def documents(self, start: int) -> Iterator[str]:
        at = start
        failures = 0
        while True:
            try:
                for row in self._rows.skip(at) if at else self._rows:
                    yield self._text(row, at)
                    at += 1
                    failures = 0
                return
            except ConfigurationError:
                raise
            # What a remote reader raises is of many kinds: sockets, HTTP, decompression of a cut-off answer.
            except Exception as error:
                if _is_broken_data(error):
                    raise SourceFailed(
                        f"{self.name}: document {at} is broken, and a stream ends there: {root_cause(error)}; "
                        "stageline prepare, on the files, leaves it out"
                    ) from error
                if failures == len(self._waits):
                    raise SourceFailed(
                        f"{self.name}: document {at} could not be read in {failures + 1} attempts; "
                        f"the last failed with {root_cause(error)}"
                    ) from error
                wait = self._waits[failures]
                failures += 1
                _log.warning(
                    "%s: reading document %d failed (%s); attempt %d of %d in %g s",
                    *(self.name, at, root_cause(error), failures + 1, len(self._waits) + 1, wait),
                )
                time.sleep(wait)

    def _text(self, row: dict[str, Any], at: int) -> str:
        if self._column not in row:
            raise ConfigurationError(
                f'{self.name}: document {at} has no column "{self._column}" (training.text_column); '
                f"it has {', '.join(row)}"
            )
        text = row[self._column]
        if text is None or text == "":
            return FlawedText("", f"document {at}: empty")
        if not isinstance(text, str):
            raise ConfigurationError(
                f'{self.name}: the column "{self._column}" of document {at} holds {type(text).__name__}, not text'
            )
        return text


def _is_broken_data(error: BaseException) -> bool:
    """Whether what came is no JSON, no table or no text, which it would be again; failures of the network are others."""
    while error.__cause__ is not None:
        error = error.__cause__
    return isinstance(error, ValueError)


def open_hub(dataset: str, dataset_path: str | None, text_column: str) -> HubSource:
    """Open hub data set `dataset`; with `dataset_path`, the folder or hub name there in its place.

    Raises ConfigurationError for a name that does not exist, or a hub that is not reached.
    """
    named = HubName.parse(dataset)
    if dataset_path:
        path = Path(dataset_path).expanduser()
        named = HubName(str(path) if path.exists() else dataset_path, named.config, named.split)
    name = f'dataset "{dataset}" ({named})'
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    try:
        with quiet_datasets():
            rows = load_dataset(named.path, named.config, split=named.split, streaming=True)
    except DatasetNotFoundError as error:
        raise ConfigurationError(
            f"{name}: there is no such data set, or it asks for a login; datasets without the hub: {', '.join(LOCAL)}"
        ) from error
    # The hub's client, the file system layer and the builders raise errors of many kinds.
    except Exception as error:
        raise ConfigurationError(f"{name} could not be opened: {type(error).__name__}: {error}") from error
    return HubSource(name, rows, text_column)
