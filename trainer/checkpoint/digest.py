"""Checksums that are computed while a file is written. No torch here."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Protocol

_CHUNK = 2**22
_WORTH_A_THREAD = 2**16  # bytes; smaller pieces are done sooner than another thread wakes up


class Digest(Protocol):
    """A checksum in the making, such as those of hashlib."""

    def update(self, data: bytes | memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


NewDigest = Callable[[], Digest]


def sha256() -> Digest:
    """That of a checkpoint's manifest: processors compute it faster than what else withstands malice."""
    return hashlib.sha256()


class Crc32:
    """Tells damaged data from what was written, several times faster than what withstands malice."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: bytes | memoryview, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def checksum(path: Path, new_digest: NewDigest) -> str:
    """The checksum of a file's contents, in hexadecimal."""
    digest = new_digest()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


class HashingFile:
    """A file that is written from beginning to end, and its checksum meanwhile, large pieces on another thread."""

    def __init__(self, file: BinaryIO, digest: Digest) -> None:
        self._file = file
        self._digest = digest
        self._thread = ThreadPoolExecutor(max_workers=1)
        self.size = 0

    def __enter__(self) -> HashingFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown()

    def write(self, data: bytes | memoryview) -> int:
        if len(data) < _WORTH_A_THREAD:
            self._digest.update(data)
            self._file.write(data)
        else:
            updated = self._thread.submit(self._digest.update, data)
            self._file.write(data)
            updated.result()  # only now may the caller change the data
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        self._file.flush()

    def tell(self) -> int:
        return self.size

    def close(self) -> None:
        """Whoever opened the file closes it; here for writers that want to."""

    def finish(self) -> str:
        """Put everything on the disk; the checksum in hexadecimal."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self.hexdigest()

    def hexdigest(self) -> str:
        """The checksum of what has been written."""
        return self._digest.hexdigest()
