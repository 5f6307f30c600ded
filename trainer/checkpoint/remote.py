"""Checkpoints on a file system that fsspec knows, by its URL: s3://, gs://, az://, hf://, sftp://, memory://, ...

Object stores cannot rename a folder, so a checkpoint is written where it is to stay:

    step-500/unfinished      there from before the first file is written until after the manifest is, and again from
                             before the manifest is removed until after the last file is
    step-500/manifest.json   makes it a checkpoint; written last, removed first

So a folder with a manifest is whole, and one with `unfinished` alone is what a crash left: of us, and to be removed.
What this costs: an earlier checkpoint of the same step is gone as soon as the new one is begun.
Credentials and options come from where fsspec and its packages look for them: environment, ~/.config/fsspec.
"""

from __future__ import annotations

import io
import posixpath
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

import fsspec

from trainer.checkpoint.digest import HashingFile, sha256
from trainer.checkpoint.manifest import MANIFEST_NAME

MARK = "unfinished"


@dataclass(frozen=True)
class RemoteFolder:
    """See `Folder`."""

    system: Any  # fsspec's AbstractFileSystem
    path: str

    @property
    def name(self) -> str:
        return posixpath.basename(self.path)

    def __str__(self) -> str:
        return str(self.system.unstrip_protocol(self.path))

    def sizes(self) -> dict[str, int]:
        return {
            _base(entry): int(entry["size"] or 0)
            for entry in _list(self.system, self.path)
            if entry["type"] == "file"
        }

    def open(self, name: str) -> BinaryIO:
        return self.system.open(f"{self.path}/{name}", "rb")

    @contextmanager
    def open_part(self, name: str, offset: int, length: int) -> Iterator[BinaryIO]:
        """One request for all of it: who reads here and there in it would make many."""
        yield io.BytesIO(self.system.cat_file(f"{self.path}/{name}", start=offset, end=offset + length))

    @contextmanager
    def create(self, name: str) -> Iterator[HashingFile]:
        self.system.makedirs(self.path, exist_ok=True)
        with self.system.open(f"{self.path}/{name}", "wb") as stream, HashingFile(stream, sha256()) as file:
            yield file

    def write_whole(self, name: str, contents: bytes) -> None:
        """A store of objects has it when all of it has arrived; elsewhere half a manifest is none."""
        self.system.makedirs(self.path, exist_ok=True)
        self.system.pipe_file(f"{self.path}/{name}", contents)


@dataclass(frozen=True)
class RemoteRoot:
    """See `Root`."""

    system: Any
    path: str

    @classmethod
    def of(cls, url: str) -> RemoteRoot:
        """Raises ValueError or ImportError if fsspec does not know such URLs or lacks a package for them."""
        system, path = fsspec.core.url_to_fs(url)
        return cls(system, path.rstrip("/"))

    def __str__(self) -> str:
        return str(self.system.unstrip_protocol(self.path))

    def names(self) -> list[str]:
        return sorted(_base(e) for e in _list(self.system, self.path) if e["type"] == "directory")

    def folder(self, name: str) -> RemoteFolder:
        return RemoteFolder(self.system, f"{self.path}/{name}")

    def begin(self, name: str) -> None:
        folder = self.folder(name)
        folder.write_whole(MARK, b"")
        self._empty(folder)

    def writing(self, name: str) -> RemoteFolder:
        return self.folder(name)

    def publish(self, name: str) -> RemoteFolder:
        folder = self.folder(name)
        self.system.rm_file(f"{folder.path}/{MARK}")
        return folder

    def discard(self, name: str) -> None:
        with suppress(OSError):  # what is left has no manifest, and is removed at the next start
            if MARK in self.folder(name).sizes():
                self.remove(name)

    def remove(self, name: str) -> None:
        folder = self.folder(name)
        folder.write_whole(MARK, b"")
        self._empty(folder)
        self.system.rm_file(f"{folder.path}/{MARK}")
        self._remove_folder(name)

    def clean_up(self, names: re.Pattern[str]) -> list[str]:
        done = []
        for name in filter(names.fullmatch, self.names()):
            files = self.folder(name).sizes()
            if not files:
                self._remove_folder(name)
            if MARK not in files:
                continue
            if MANIFEST_NAME in files:
                self.publish(name)
            else:
                self.remove(name)
                done.append(name)
        return done

    def _remove_folder(self, name: str) -> None:
        """An empty one; in a store of objects there is none."""
        with suppress(OSError, NotImplementedError):
            self.system.rmdir(f"{self.path}/{name}")

    def _empty(self, folder: RemoteFolder) -> None:
        """Remove all files but the mark, the manifest first."""
        files = folder.sizes()
        if MANIFEST_NAME in files:
            self.system.rm_file(f"{folder.path}/{MANIFEST_NAME}")
        rest = [f"{folder.path}/{name}" for name in files if name not in (MANIFEST_NAME, MARK)]
        if rest:
            self.system.rm(rest)


def _list(system: Any, path: str) -> list[dict[str, Any]]:
    system.invalidate_cache()  # other ranks write there too
    try:
        return list(system.ls(path, detail=True))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _base(entry: dict[str, Any]) -> str:
    return posixpath.basename(str(entry["name"]).rstrip("/"))
