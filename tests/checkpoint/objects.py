"""A file system of fsspec's like a store of objects: nothing can be renamed. Its files lie on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

PROTOCOL = "objects"


class ObjectStore(LocalFileSystem):
    """URLs are objects:///path of this machine, so that several processes see the same."""

    protocol = PROTOCOL

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(LocalFileSystem._strip_protocol(str(path).removeprefix(f"{PROTOCOL}://")))

    def unstrip_protocol(self, name: str) -> str:
        return f"{PROTOCOL}://{name.removeprefix(f'{PROTOCOL}://')}"

    def mv(self, *_: Any, **__: Any) -> None:
        raise AssertionError("a store of objects cannot rename")

    mv_file = mv
    move = mv
    rename = mv


def url(folder: Path) -> str:
    """The URL of a folder in the store, which fsspec knows from now on."""
    fsspec.register_implementation(PROTOCOL, ObjectStore, clobber=True)
    return f"{PROTOCOL}://{folder}"
