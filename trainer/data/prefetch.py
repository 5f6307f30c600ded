"""An iterator that a thread runs ahead of its reader, so that the step does not wait for the tokenizer."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")

_JOIN_SECONDS = 2.0


@dataclass(frozen=True)
class _Raised:
    error: BaseException


class Prefetcher(Generic[Item]):
    """Yields what `items` yields, at most `depth` of it made before it is asked for.

    What `items` raises is raised to the reader, in its turn. The thread ends with the iterator, with `close`, when
    the object is no longer referred to, and at the end of the program.
    """

    def __init__(self, items: Iterator[Item], depth: int) -> None:
        self._ready: queue.Queue[Item | _Raised] = queue.Queue(maxsize=depth)
        stopped = threading.Event()
        # The thread must not hold the object itself, or it would never be let go.
        thread = threading.Thread(
            target=_fill, args=(items, self._ready, stopped), name="stageline-data", daemon=True
        )
        self._finalizer = weakref.finalize(self, _stop, self._ready, stopped, thread)
        self._ended: BaseException | None = None
        thread.start()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        if self._ended is None:
            item = self._ready.get()
            if not isinstance(item, _Raised):
                return item
            self._ended = item.error
        raise self._ended

    def close(self) -> None:
        """End the thread and forget what it has made."""
        self._finalizer()


def _fill(items: Iterator[Item], ready: queue.Queue[Item | _Raised], stopped: threading.Event) -> None:
    try:
        for item in items:
            ready.put(item)
            if stopped.is_set():
                return
        ready.put(_Raised(StopIteration()))
    # Whatever it is, it belongs to the reader: raised here it would end this thread and leave the reader waiting.
    except BaseException as error:
        ready.put(_Raised(error))


def _stop(ready: queue.Queue[Item | _Raised], stopped: threading.Event, thread: threading.Thread) -> None:
    stopped.set()
    # A thread that waits for room finds it, sees that it has to stop, and puts at most one item more.
    while not ready.empty():
        ready.get_nowait()
    if thread is not threading.current_thread():
        thread.join(_JOIN_SECONDS)
