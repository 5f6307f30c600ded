"""Checkpoints on a file system of this machine, shared between nodes or not.

    step-500            a checkpoint; only these are ever counted or removed by retention
    step-500.partial    being written; what a crash leaves of it is removed at the next start
    step-500.replaced   the former step-500 while a new one takes its place
    step-500.removing   no longer wanted, being removed

A checkpoint changes its name before it is removed, so a step-N is never half a checkpoint because of us.
Everything else in the folder belongs to somebody else and is left alone.
"""

from __future__ import annotations

import io
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from trainer.checkpoint.digest import HashingFile, sha256


@dataclass(frozen=True)
class LocalFolder:
    """See `Folder`. What is not a regular file, a link too, is not there: it could lead out of the folder."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    def __str__(self) -> str:
        return str(self.path)

    def sizes(self) -> dict[str, int]:
        try:
            with os.scandir(self.path) as entries:
                return {e.name: e.stat().st_size for e in entries if e.is_file(follow_symlinks=False)}
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def open(self, name: str) -> BinaryIO:
        return (self.path / name).open("rb")

    @contextmanager
    def open_part(self, name: str, offset: int, length: int) -> Iterator[BinaryIO]:
        with (self.path / name).open("rb", buffering=0) as file:
            yield _Part(file, offset, length)  # type: ignore[misc]

    @contextmanager
    def create(self, name: str) -> Iterator[HashingFile]:
        with (self.path / name).open("wb") as stream, HashingFile(stream, sha256()) as file:
            yield file
            file.finish()

    def write_whole(self, name: str, contents: bytes) -> None:
        temporary = self.path / f"{name}.partial"
        with temporary.open("wb") as stream:
            stream.write(contents)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.rename(self.path / name)
        sync_folder(self.path)


@dataclass(frozen=True)
class LocalRoot:
    """See `Root`."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def names(self) -> list[str]:
        """A link to a folder leads to something that is not ours to remove, so it is not listed."""
        if not self.path.is_dir():
            return []
        return sorted(path.name for path in self.path.iterdir() if path.is_dir() and not path.is_symlink())

    def folder(self, name: str) -> LocalFolder:
        return LocalFolder(self.path / name)

    def begin(self, name: str) -> None:
        """An earlier checkpoint of this name stays until the new one takes its place."""
        partial = self.writing(name).path
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)

    def writing(self, name: str) -> LocalFolder:
        return LocalFolder(self.path / f"{name}.partial")

    def publish(self, name: str) -> LocalFolder:
        final, replaced = self.path / name, self.path / f"{name}.replaced"
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        self.writing(name).path.rename(final)
        sync_folder(self.path)
        # The new one is valid; what cannot be removed now is removed at the next start.
        shutil.rmtree(replaced, ignore_errors=True)
        return LocalFolder(final)

    def discard(self, name: str) -> None:
        shutil.rmtree(self.writing(name).path, ignore_errors=True)

    def remove(self, name: str) -> None:
        removing = self.path / f"{name}.removing"
        (self.path / name).rename(removing)
        shutil.rmtree(removing)

    def clean_up(self, names: re.Pattern[str]) -> list[str]:
        done = []
        for found in self.names():
            name, _, state = found.rpartition(".")
            if not names.fullmatch(name):
                continue
            if state == "replaced" and not (self.path / name).exists():
                # The save ended between the two renames: the former checkpoint is still the valid one.
                (self.path / found).rename(self.path / name)
                done.append(found)
            elif state in ("partial", "replaced", "removing"):
                shutil.rmtree(self.path / found)
                done.append(found)
        return done


class _Part(io.RawIOBase):
    """Some bytes of a file, to be read as if they were all of it."""

    def __init__(self, file: io.FileIO, offset: int, length: int) -> None:
        self._file = file
        self._offset = offset
        self._length = length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if position < 0:
            raise OSError("seek before the beginning")
        self._position = position
        return position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._position)]
        self._file.seek(self._offset + self._position)
        done = 0
        while done < len(view) and (read := self._file.readinto(view[done:])):  # at most 2 GiB at once
            done += read
        self._position += done
        return done


def sync_folder(folder: Path) -> None:
    """Make renames within a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
