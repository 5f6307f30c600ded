"""The manifest: the file that makes a folder a valid checkpoint.

It lists every file with size and checksum, has a checksum of its own, and is written last: a folder without one is a
save that did not finish, and one whose files do not match it is damaged. No torch here: validity can be told without.
A manifest may come from anybody: it names files of its own folder only, and nothing is read before its size is known.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from trainer.checkpoint.filesystem import Folder, as_folder

FORMAT_VERSION = 2
MANIFEST_NAME = "manifest.json"

_LARGEST = 2**28  # bytes of a manifest: over a million files


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
        name: within the checkpoint's folder; it leads nowhere else.
        size: bytes.
        sha256: in hexadecimal.
    """

    name: str
    size: int
    sha256: str


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
        fields = {"format_version": FORMAT_VERSION, **asdict(self)}
        own = hashlib.sha256(json.dumps(fields).encode()).hexdigest()
        return json.dumps({**fields, "sha256": own}, indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Manifest:
        """Raises InvalidCheckpoint if the text is not, character by character, what `to_json` writes."""
        try:
            manifest = _understand(json.loads(text))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, InvalidCheckpoint):
                raise
            raise InvalidCheckpoint(f"manifest cannot be understood: {error}") from error
        if manifest.to_json() != text:
            raise InvalidCheckpoint("manifest is damaged: its checksum differs")
        return manifest


def _understand(fields: Any) -> Manifest:
    version = fields.pop("format_version")
    if version != FORMAT_VERSION:
        raise InvalidCheckpoint(f"manifest of format version {version}, this program reads {FORMAT_VERSION}")
    del fields["sha256"]
    fields["contents"] = Contents(fields["contents"])
    fields["files"] = tuple(FileEntry(**entry) for entry in fields["files"])
    manifest = Manifest(**fields)
    counts = [manifest.step, manifest.world_size, *(entry.size for entry in manifest.files)]
    texts = [manifest.layout, *(entry.sha256 for entry in manifest.files)]
    if not all(type(count) is int and count >= 0 for count in counts):
        raise InvalidCheckpoint(
            "manifest cannot be understood: a step, a size or a number of ranks is no count"
        )
    if not all(isinstance(text, str) for text in texts):
        raise InvalidCheckpoint("manifest cannot be understood: a layout or a checksum is no text")
    if outside := [entry.name for entry in manifest.files if not is_plain(entry.name)]:
        raise InvalidCheckpoint(f"manifest leads out of the checkpoint: {str(outside[0])[:100]!r}")
    return manifest


def is_plain(name: Any) -> bool:
    """Whether it is the name of a file in a folder, and not a path that could lead elsewhere."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")


def describe_files(folder: Path | Folder, names: Iterable[str]) -> tuple[FileEntry, ...]:
    """Size and checksum of each named file, read from disk."""
    folder = as_folder(folder)
    sizes = folder.sizes()
    return tuple(FileEntry(name, sizes[name], checksum(folder, name)) for name in names)


def checksum(folder: Path | Folder, name: str) -> str:
    """The hexadecimal SHA-256 of a file's contents."""
    digest = hashlib.sha256()
    with as_folder(folder).open(name) as file:
        while chunk := file.read(2**22):
            digest.update(chunk)
    return digest.hexdigest()


def write_manifest(folder: Path | Folder, manifest: Manifest) -> None:
    """Write the manifest so that after a power cut it is either whole or absent.

    Raises:
        InvalidCheckpoint: a file that it lists is not there with that size, as when the ranks of several
            nodes do not see the same folder.
        OSError: writing failed.
    """
    folder = as_folder(folder)
    problems = size_problems(folder.sizes(), manifest.files)
    if problems:
        raise InvalidCheckpoint(f"{'; '.join(problems)} (do all ranks write to the same file system?)")
    folder.write_whole(MANIFEST_NAME, manifest.to_json().encode())


def read_manifest(folder: Path | Folder) -> Manifest:
    """The manifest of a checkpoint whose files all exist with the right sizes; checksums are not computed.

    Raises:
        InvalidCheckpoint: there is none, it cannot be understood, or a file is missing or has another size.
    """
    folder = as_folder(folder)
    try:
        sizes = folder.sizes()
        if MANIFEST_NAME not in sizes:
            raise InvalidCheckpoint("no manifest: the save did not finish")
        if sizes[MANIFEST_NAME] > _LARGEST:
            raise InvalidCheckpoint(
                f"manifest of {sizes[MANIFEST_NAME]} bytes, this program reads {_LARGEST}"
            )
        with folder.open(MANIFEST_NAME) as file:
            text = file.read(_LARGEST).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidCheckpoint(f"manifest cannot be read: {error}") from error
    manifest = Manifest.from_json(text)
    problems = size_problems(sizes, manifest.files)
    if problems:
        raise InvalidCheckpoint("; ".join(problems))
    return manifest


def size_problems(sizes: dict[str, int], files: Sequence[FileEntry]) -> tuple[str, ...]:
    """A sentence for each file that is missing or has another size than listed."""
    problems = []
    for entry in files:
        if entry.name not in sizes:
            problems.append(f"{entry.name} is missing")
        elif sizes[entry.name] != entry.size:
            problems.append(f"{entry.name} has {sizes[entry.name]} bytes instead of {entry.size}")
    return tuple(problems)


def checksum_problems(folder: Path | Folder, files: Sequence[FileEntry]) -> tuple[str, ...]:
    """A sentence for each file whose contents are not those that were written."""
    problems = []
    for entry in files:
        try:
            damaged = checksum(folder, entry.name) != entry.sha256
        except OSError as error:
            problems.append(f"{entry.name} cannot be read ({error.strerror})")
            continue
        if damaged:
            problems.append(f"{entry.name} is damaged: its checksum differs")
    return tuple(problems)
