"""Reads files that may be missing, torn or anything else; what could not be read is remembered in words."""

from __future__ import annotations

import json
from pathlib import Path

from trainer.report.loose import Loose


class FolderReader:
    """Reads the files of one folder. `problems` has a sentence for each that could not be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problems: list[str] = []

    def json(self, name: str, *, expected: bool = True) -> Loose:
        """A JSON file, or nothing; a missing one is a problem only if it is `expected`."""
        content = self._bytes(name, expected)
        if content is None:
            return Loose()
        try:
            return Loose(json.loads(content))
        except (ValueError, RecursionError) as error:
            self._say(name, f"is no whole JSON: {_reason(error)}")
            return Loose()

    def toml(self, name: str) -> Loose:
        """A TOML file, or nothing."""
        import tomli

        content = self._bytes(name, expected=True)
        if content is None:
            return Loose()
        try:
            return Loose(tomli.loads(content.decode()))
        except (ValueError, RecursionError) as error:
            self._say(name, f"is no whole TOML: {_reason(error)}")
            return Loose()

    def json_lines(self, name: str) -> list[Loose]:
        """The objects of a file with one in each line. Lines that are none are counted as a problem."""
        lines = (self._bytes(name, expected=True) or b"").split(b"\n")
        rows, torn = [], 0
        for line in lines:
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict):
                rows.append(Loose(row))
            else:
                torn += 1
        if torn:
            self._say(name, f"has {torn} {'line' if torn == 1 else 'lines'} that cannot be read")
        return rows

    def text(self, name: str) -> str | None:
        """A text file, or None."""
        content = self._bytes(name, expected=True)
        return None if content is None else content.decode(errors="replace")

    def _bytes(self, name: str, expected: bool) -> bytes | None:
        path = self.folder / name
        try:
            # Anything but a file, such as a pipe, might never end.
            if path.exists() and not path.is_file():
                self._say(name, "is not a file")
                return None
            return path.read_bytes()
        except FileNotFoundError:
            if expected:
                self._say(name, "is missing")
        except OSError as error:
            self._say(name, f"cannot be read: {error.strerror}")
        return None

    def _say(self, name: str, what: str) -> None:
        self.problems.append(f"{name} {what}")


def _reason(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)
