"""Where checkpoints lie: on this file system or on any that fsspec knows, behind the same few operations.

A `Folder` holds the files of one checkpoint, a `Root` the folders of all. How a checkpoint comes and goes without
ever being taken for whole when it is not, is theirs to know: `local.py` renames, `remote.py` marks.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Protocol

from trainer.checkpoint.digest import HashingFile
from trainer.errors import ConfigurationError

_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.:-]*://")


class Folder(Protocol):
    """A folder of files, such as a checkpoint. Names are plain: no path leads out of it."""

    @property
    def name(self) -> str: ...

    def __str__(self) -> str: ...

    def sizes(self) -> dict[str, int]:
        """Bytes of each regular file in it; empty if there is no such folder."""

    def open(self, name: str) -> BinaryIO:
        """A file, to be read from its beginning."""

    def open_part(self, name: str, offset: int, length: int) -> AbstractContextManager[BinaryIO]:
        """`length` bytes of a file, seekable, to be read as if they were a file."""

    def create(self, name: str) -> AbstractContextManager[HashingFile]:
        """A new file; when the context ends it is where a power cut does not reach it."""

    def write_whole(self, name: str, contents: bytes) -> None:
        """A new file that after a power cut is either whole or absent."""


class Root(Protocol):
    """The folder that holds the checkpoints of a run. One process (rank 0) changes it, all write into `writing`."""

    def __str__(self) -> str: ...

    def names(self) -> list[str]:
        """Names of the folders in it."""

    def folder(self, name: str) -> Folder: ...

    def begin(self, name: str) -> None:
        """An empty folder to write a checkpoint into. An earlier one of this name may be gone from now on."""

    def writing(self, name: str) -> Folder:
        """The folder that `begin` made."""

    def publish(self, name: str) -> Folder:
        """Make what was written, its manifest among it, the checkpoint of this name."""

    def discard(self, name: str) -> None:
        """Remove what was written and is not to be published."""

    def remove(self, name: str) -> None:
        """Remove a checkpoint: at no moment is it there in part."""

    def clean_up(self, names: re.Pattern[str]) -> list[str]:
        """Remove what interrupted saves and removals of checkpoints of such names left; what was done, in names."""


def is_url(path: str) -> bool:
    """Whether a path is one of fsspec's, e.g. s3://bucket/run, rather than one of this machine."""
    return _URL.match(path) is not None


def open_root(run_folder: Path, folder: str) -> Root:
    """The checkpoints of a run: `[checkpoint] folder` is a path within the run's folder, an absolute one, or a URL.

    file:// means a path of this machine, with all that makes it safe here.

    Raises:
        ConfigurationError: fsspec does not know such URLs, or lacks a package for them.
    """
    from trainer.checkpoint.local import LocalRoot

    if not is_url(folder):
        return LocalRoot(run_folder / folder)
    if folder.startswith("file://"):
        return LocalRoot(Path(folder.removeprefix("file://")))
    from trainer.checkpoint.remote import RemoteRoot

    try:
        return RemoteRoot.of(folder)
    except (ImportError, ValueError) as error:
        raise ConfigurationError(str(error)) from error


def as_folder(folder: Path | Folder) -> Folder:
    """A path of this machine as a folder."""
    from trainer.checkpoint.local import LocalFolder

    return LocalFolder(folder) if isinstance(folder, Path) else folder
