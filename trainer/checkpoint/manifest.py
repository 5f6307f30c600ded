"""The manifest: the file that makes a folder a valid checkpoint.

It lists every file with size and checksum and is written last, so a folder without one is a save that did not
finish, and one whose files do not match it is damaged. No torch here: validity can be told without it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"


class Contents(StrEnum):
    """What a checkpoint holds."""

    FULL = "full"  # all that a run needs to go on
    WEIGHTS = "weights"  # the model's parameters only


class InvalidCheckpoint(ValueError):
    """A folder is not a checkpoint that can be relied on; the message says why."""


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint.

    Attributes:
        name: path relative to the checkpoint's folder, with forward slashes.
        size: bytes.
        blake2b: BLAKE2b digest of 32 bytes, in hexadecimal.
    """

    name: str
    size: int
    blake2b: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is and which files it consists of.

    Attributes:
        step: training steps made before it was saved.
        contents: see `Contents`.
        layout: the mesh in words; equal texts mean that every rank held the same part of the state.
        world_size: number of ranks that wrote it.
        files: all files but the manifest itself.
    """

    step: int
    contents: Contents
    layout: str
    world_size: int
    files: tuple[FileEntry, ...]

    def to_json(self) -> str:
        return json.dumps({"format_version": FORMAT_VERSION, **asdict(self)}, indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Manifest:
        """Raises InvalidCheckpoint if the text is no manifest of a version that this program reads."""
        try:
            fields = json.loads(text)
            version = fields.pop("format_version")
            if version != FORMAT_VERSION:
                raise InvalidCheckpoint(
                    f"manifest of format version {version}, this program reads {FORMAT_VERSION}"
                )
            fields["contents"] = Contents(fields["contents"])
            fields["files"] = tuple(FileEntry(**entry) for entry in fields["files"])
            return Manifest(**fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, InvalidCheckpoint):
                raise
            raise InvalidCheckpoint(f"manifest cannot be understood: {error}") from error


def describe_files(folder: Path, names: Iterable[str]) -> tuple[FileEntry, ...]:
    """Size and checksum of each named file, read from disk."""
    return tuple(FileEntry(name, (folder / name).stat().st_size, checksum(folder / name)) for name in names)


def checksum(path: Path) -> str:
    """The hexadecimal BLAKE2b digest (32 bytes) of a file's contents."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest so that after a power cut it is either whole or absent.

    Raises:
        InvalidCheckpoint: a file that it lists is not there with that size, as when the ranks of several
            nodes do not see the same folder.
        OSError: writing failed.
    """
    problems = size_problems(folder, manifest.files)
    if problems:
        raise InvalidCheckpoint(f"{'; '.join(problems)} (do all ranks write to the same file system?)")
    temporary = folder / f"{MANIFEST_NAME}.partial"
    with temporary.open("w") as file:
        file.write(manifest.to_json())
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(folder / MANIFEST_NAME)
    sync_folder(folder)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose files all exist with the right sizes; checksums are not computed.

    Raises:
        InvalidCheckpoint: there is none, it cannot be understood, or a file is missing or has another size.
    """
    try:
        text = (folder / MANIFEST_NAME).read_text()
    except FileNotFoundError:
        raise InvalidCheckpoint("no manifest: the save did not finish") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidCheckpoint(f"manifest cannot be read: {error}") from error
    manifest = Manifest.from_json(text)
    problems = size_problems(folder, manifest.files)
    if problems:
        raise InvalidCheckpoint("; ".join(problems))
    return manifest


def size_problems(folder: Path, files: Sequence[FileEntry]) -> tuple[str, ...]:
    """A sentence for each file that is missing or has another size than listed."""
    problems = []
    for entry in files:
        try:
            size = (folder / entry.name).stat().st_size
        except OSError as error:
            problems.append(f"{entry.name} is missing ({error.strerror})")
            continue
        if size != entry.size:
            problems.append(f"{entry.name} has {size} bytes instead of {entry.size}")
    return tuple(problems)


def checksum_problems(folder: Path, files: Sequence[FileEntry]) -> tuple[str, ...]:
    """A sentence for each file whose contents are not those that were written."""
    problems = []
    for entry in files:
        try:
            damaged = checksum(folder / entry.name) != entry.blake2b
        except OSError as error:
            problems.append(f"{entry.name} cannot be read ({error.strerror})")
            continue
        if damaged:
            problems.append(f"{entry.name} is damaged: its checksum differs")
    return tuple(problems)


def sync_folder(folder: Path) -> None:
    """Make renames within a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
