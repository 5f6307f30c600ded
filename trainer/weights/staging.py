"""A folder that is being written: whole at its final name, or not there; what an interrupted start finished is kept.

OUT.partial/                 where everything is written
OUT.partial/progress.json    what it is made from, and which files are finished, with size and checksum
OUT/                         the former, renamed when the last file is on the disk
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.checkpoint.digest import NewDigest, checksum
from trainer.checkpoint.local import sync_folder
from trainer.errors import ConfigurationError

JOURNAL_NAME = "progress.json"


@dataclass(frozen=True)
class Finished:
    """A file that is on the disk: path within the folder, bytes, checksum, and what its writer noted about it."""

    name: str
    size: int
    checksum: str
    notes: Any = None


class Staging:
    """One folder that is being written, by one process."""

    def __init__(self, target: Path, origin: Mapping[str, Any], new_digest: NewDigest) -> None:
        """Begin, or go on with what an earlier start from the same `origin` left; from another it is removed.

        Args:
            target: the folder to be; must not exist, or be empty.
            origin: everything that decides what will be written; JSON can hold it.
            new_digest: of the checksums.

        Raises:
            ConfigurationError: there is something at `target` already.
        """
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise ConfigurationError(f"{target} exists already; name another folder, or remove it")
        self.target = target
        self.path = target.with_name(f"{target.name}.partial")
        self._new_digest = new_digest
        self._origin: dict[str, Any] = json.loads(json.dumps(origin))
        self._finished = self._read_journal()
        if self._finished is None:
            if self.path.exists():
                shutil.rmtree(self.path)
            self._finished = {}
        self.path.mkdir(parents=True, exist_ok=True)

    def finished(self, name: str) -> Finished | None:
        """A file that an earlier start finished, if it is there and its checksum agrees."""
        assert self._finished is not None
        found = self._finished.get(name)
        path = self.path / name
        if found is None or not path.is_file() or path.stat().st_size != found.size:
            return None
        return found if checksum(path, self._new_digest) == found.checksum else None

    def finish(self, file: Finished) -> Finished:
        """Note that a file is on the disk; JSON can hold its notes."""
        assert self._finished is not None
        self._finished[file.name] = file
        journal = {"origin": self._origin, "files": [asdict(each) for each in self._finished.values()]}
        temporary = self.path / f"{JOURNAL_NAME}.partial"
        with temporary.open("w", encoding="utf-8") as stream:
            json.dump(journal, stream)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.rename(self.path / JOURNAL_NAME)
        return file

    def publish(self) -> None:
        """Give the folder its final name. Nothing but what was written there may be in it."""
        (self.path / JOURNAL_NAME).unlink(missing_ok=True)
        sync_folder(self.path)
        self.path.rename(self.target)
        sync_folder(self.target.parent)

    def _read_journal(self) -> dict[str, Finished] | None:
        """The finished files by name, or None if there is no journal of the same origin."""
        try:
            journal = json.loads((self.path / JOURNAL_NAME).read_text(encoding="utf-8"))
            if journal["origin"] != self._origin:
                return None
            files = [Finished(**each) for each in journal["files"]]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return {each.name: each for each in files}
