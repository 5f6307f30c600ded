"""Documents that are files: the text that ships with Python, and folders of .txt files."""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.data.errors import SourceFailed
from trainer.data.sources import FlawedText, IndexedSource
from trainer.errors import ConfigurationError

LONGEST_DOCUMENT = 4 << 20
"""Bytes. A larger file is read as several documents of about this size, cut at line ends, so that neither memory
nor the time to resume depends on the size of a file."""

_PYTHON_DOCUMENT = 2 << 10
"""Bytes. Files of the standard library are cut this short, so that the few sequences of a small batch come from
several files and not all from one table of Unicode."""

_LONGEST_LINE = 64 << 10
_PYTHON_SUFFIXES = (".py", ".txt", ".rst", ".md")
_NOT_PYTHONS_OWN = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class FoundFile:
    """A file of a data set: where it is, its name relative to what was asked for, and its bytes."""

    path: Path
    relative: str
    size: int


@dataclass(frozen=True)
class FilePart:
    """A document: the `number`-th part of a file, each of about `size` bytes."""

    file: FoundFile
    number: int
    size: int

    def read(self) -> tuple[int, bytes]:
        """Where the part begins in the file, and its bytes. Raises OSError."""
        return _part_of(self.file.path, self.number, self.size)

    @property
    def encoding(self) -> str:
        """UTF-8; only the beginning of a file can hold a byte order mark, which is dropped."""
        return "utf-8-sig" if self.number == 0 else "utf-8"


class FileSource(IndexedSource):
    """A document per file, in the order given; broken UTF-8 becomes U+FFFD, a byte order mark is dropped."""

    def __init__(
        self, name: str, files: Sequence[FoundFile], longest: int | None = None, *, empty_is_bad: bool = True
    ) -> None:
        """`longest`: bytes of a document; None for LONGEST_DOCUMENT."""
        self.name = name
        self._empty_is_bad = empty_is_bad
        self.fingerprint = fingerprint(files)
        size = LONGEST_DOCUMENT if longest is None else longest
        self.parts = [
            FilePart(file, number, size) for file in files for number in range(max(1, -(-file.size // size)))
        ]

    def __len__(self) -> int:
        return len(self.parts)

    def read(self, index: int) -> str:
        part = self.parts[index]
        if part.file.size == 0 and self._empty_is_bad:
            return FlawedText("", f"{part.file.path}: empty")
        try:
            begin, content = part.read()
        except OSError as error:
            raise SourceFailed(f"{self.name}: {part.file.path} cannot be read: {error.strerror}") from error
        try:
            return content.decode(part.encoding)
        except UnicodeDecodeError as error:
            flaw = f"{part.file.path}, byte {begin + error.start}: broken UTF-8: {error.reason}"
            return FlawedText(content.decode(part.encoding, errors="replace"), flaw)


def python_docs() -> FileSource:
    """The standard library of the running Python, without installed packages: tens of megabytes of real text."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = find_files(root, _PYTHON_SUFFIXES, without=_NOT_PYTHONS_OWN)
    if not files:
        raise ConfigurationError(
            f'dataset "python_docs": no text in {root}; this Python comes without its library as files'
        )
    # Python has empty files on purpose.
    return FileSource(f"python_docs ({root})", files, _PYTHON_DOCUMENT, empty_is_bad=False)


def text_files(dataset_path: str) -> FileSource:
    """The file, the .txt files of the folder and its folders, or the files that the pattern matches."""
    return FileSource(f'dataset "text" ({dataset_path})', matching_files(dataset_path, (".txt",)))


def matching_files(dataset_path: str, suffixes: tuple[str, ...]) -> list[FoundFile]:
    """The files of a data set in the order of their names. `dataset_path` is a file, a folder (its files with one
    of the suffixes, at any depth) or a pattern (`**` matches folders at any depth).

    Raises ConfigurationError if there is none, or if all of them are empty.
    """
    path = Path(dataset_path).expanduser()
    if path.is_dir():
        found = find_files(path, suffixes)
        missing = f"the folder holds no file that ends in {' or '.join(suffixes)}"
    elif path.exists():
        found = [_found(path, path.name)]
        missing = ""
    else:
        names = glob.glob(str(path), recursive=True)
        found = [_found(Path(name), name) for name in sorted(names) if os.path.isfile(name)]
        missing = "no file matches" if glob.has_magic(str(path)) else "no such file or folder"
    if not found:
        raise ConfigurationError(f"dataset_path {dataset_path}: {missing}")
    if not any(file.size for file in found):
        which = "the file is" if len(found) == 1 else f"all {len(found)} files are"
        raise ConfigurationError(f"dataset_path {dataset_path}: {which} empty")
    return found


def find_files(root: Path, suffixes: tuple[str, ...], without: Iterable[str] = ()) -> list[FoundFile]:
    """The files below `root` with one of the suffixes, sorted by relative path, the same on every machine.

    Folders named in `without` are left out; links to folders are not followed (they may lead in a circle).
    """
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in without]
        for name in names:
            path = Path(folder, name)
            if name.lower().endswith(suffixes) and path.is_file():
                found.append(_found(path, path.relative_to(root).as_posix()))
    return sorted(found, key=lambda file: file.relative)


def fingerprint(files: Iterable[FoundFile]) -> str:
    """Of the names and sizes; not of times or of where the folder lies, so that a copy is the same data."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative}\0{file.size}\n".encode("utf-8", errors="surrogateescape"))
    return digest.hexdigest()[:16]


def _found(path: Path, relative: str) -> FoundFile:
    return FoundFile(path, relative, path.stat().st_size)


def _part_of(path: Path, number: int, size: int) -> tuple[int, bytes]:
    """The bytes from the first line end after `number` times `size` to that after the next `size`, and their place."""
    with path.open("rb") as stream:

        def cut(at: int) -> int:
            if at == 0:
                return 0
            stream.seek(at - 1)
            near = stream.read(_LONGEST_LINE)
            end = near.find(b"\n")
            if end >= 0:
                return at + end
            # A line longer than that is cut in its middle, but not within a character.
            return at + next((i for i, byte in enumerate(near[1:5]) if byte & 0xC0 != 0x80), 0)

        begin = cut(number * size)
        end = cut((number + 1) * size)
        stream.seek(begin)
        return begin, stream.read(end - begin)
