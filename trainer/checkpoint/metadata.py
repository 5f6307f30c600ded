"""Reading `.metadata`, the one pickled file of a checkpoint, as if somebody hostile had written it.

The unpickler knows the classes that describe tensors and the few operations that their descriptions consist of, so
it runs nothing, changes no class, and takes memory in proportion to the file. What comes out is compared with the
files that are there: no tensor is larger than the bytes that hold it, and no name leads out of the folder.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from trainer.checkpoint.filesystem import Folder
from trainer.checkpoint.manifest import InvalidCheckpoint, is_plain

METADATA_NAME = ".metadata"

_LARGEST = 2**30  # bytes: some ten million parts of tensors

_ALLOWED = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "pathlib": {"Path", "PosixPath", "WindowsPath"},
    "pathlib._local": {"Path", "PosixPath", "WindowsPath"},  # as Python 3.13 writes them
}

# Whose attributes a description may set: objects of these, never a class or anything else.
_BUILT = (
    Metadata,
    BytesStorageMetadata,
    TensorStorageMetadata,
    TensorProperties,
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    _StorageInfo,
)

# What pickle writes of such objects since protocol 4. Left out: what takes memory by number (LONG_BINPUT), extension
# codes, persistent ids, older ways to call something.
_OPERATIONS = (
    *(
        "PROTO",
        "FRAME",
        "STOP",
        "MARK",
        "MEMOIZE",
        "BINGET",
        "LONG_BINGET",
        "STACK_GLOBAL",
        "POP",
        "POP_MARK",
    ),
    *("REDUCE", "NEWOBJ", "BUILD", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "EMPTY_SET", "ADDITEMS"),
    *("APPEND", "APPENDS", "SETITEM", "SETITEMS", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "NONE", "NEWTRUE"),
    *("NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE", "BINFLOAT"),
)


_Python: Any = pickle._Unpickler  # the one in Python, whose operations can be chosen


class _Unpickler(_Python):
    """Loads descriptions of tensors, and nothing else."""

    dispatch: ClassVar[dict[int, Any]] = {}  # set below

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        if is_dtype or name in _ALLOWED.get(module, set()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into a checkpoint")

    def load_build(self) -> None:
        if not isinstance(self.stack[-2], _BUILT):
            raise pickle.UnpicklingError("it changes what is no description of a tensor")
        super().load_build()


def _memory_format(kind: object, name: str) -> Any:
    """What early releases of Python 3.11 write of a member of an enumeration is a call of getattr: of this one, and no other."""
    if kind is not _MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError("builtins.getattr does not belong into a checkpoint")
    return _MEM_FORMAT_ENCODING[name]


_Unpickler.dispatch = {code: _Python.dispatch[code] for code in (getattr(pickle, n)[0] for n in _OPERATIONS)}
_Unpickler.dispatch[pickle.BUILD[0]] = _Unpickler.load_build


def read_metadata(folder: Folder, *, objects: bool = False) -> Metadata:
    """The description of all tensors of a checkpoint, each of which is in the folder's files.

    `objects`: there may be pickled objects beside the tensors, which are left out. Ours have none.

    Raises:
        InvalidCheckpoint: it cannot be read, is not harmless, or does not fit the files.
    """
    sizes = folder.sizes()
    try:
        if sizes.get(METADATA_NAME, 0) > _LARGEST:
            raise InvalidCheckpoint(
                f"{METADATA_NAME} has {sizes[METADATA_NAME]} bytes; at most {_LARGEST} are read"
            )
        with folder.open(METADATA_NAME) as file:
            metadata = _Unpickler(io.BytesIO(file.read(_LARGEST))).load()
    except InvalidCheckpoint:
        raise
    except Exception as error:  # of damaged bytes anything can come, and none of it is a fault of the program
        raise InvalidCheckpoint(f"{METADATA_NAME} cannot be read: {error}") from error
    if not isinstance(metadata, Metadata):
        raise InvalidCheckpoint(f"{METADATA_NAME} does not describe a checkpoint")
    try:
        if objects:
            _leave_out_objects(metadata)
        _check(metadata, sizes)
    except InvalidCheckpoint:
        raise
    except Exception as error:
        raise InvalidCheckpoint(f"{METADATA_NAME} cannot be understood: {error}") from error
    return metadata


def _leave_out_objects(metadata: Metadata) -> None:
    tensors = metadata.state_dict_metadata
    for name in [name for name, saved in tensors.items() if isinstance(saved, BytesStorageMetadata)]:
        del tensors[name]
    for index in [index for index in metadata.storage_data if index.fqn not in tensors]:
        del metadata.storage_data[index]


def _check(metadata: Metadata, sizes: Mapping[str, int]) -> None:
    tensors = metadata.state_dict_metadata
    foreign = [name for name, saved in tensors.items() if not isinstance(saved, TensorStorageMetadata)]
    if foreign:  # DCP would unpickle them
        raise InvalidCheckpoint(
            f"{METADATA_NAME} lists objects that are not tensors: {', '.join(map(str, foreign[:3]))}"
        )
    held = dict.fromkeys(sizes, 0)
    for place in metadata.storage_data.values():
        name = place.relative_path
        if not is_plain(name):
            raise InvalidCheckpoint(f"{METADATA_NAME} leads out of the checkpoint: {str(name)[:100]}")
        if name not in sizes:
            raise InvalidCheckpoint(f"{METADATA_NAME} names a file that is not there: {name}")
        if getattr(place, "transform_descriptors", None):
            raise InvalidCheckpoint(f"{METADATA_NAME}: {name} is compressed or encrypted, which is not read")
        held[name] += _count(place.length)
        if _count(place.offset) + place.length > sizes[name] or held[name] > sizes[name]:
            raise InvalidCheckpoint(f"{METADATA_NAME} describes more than there is in {name}")
    for name, saved in tensors.items():
        if isinstance(saved, TensorStorageMetadata):
            _check_tensor(name, saved, metadata)


def _check_tensor(name: str, saved: TensorStorageMetadata, metadata: Metadata) -> None:
    """Its parts make up its shape, and each is no larger than the bytes that hold it."""
    elements = 0
    for chunk in saved.chunks:
        place = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
        part = math.prod(map(_count, chunk.sizes))
        inside = all(
            _count(o) + n <= whole for o, n, whole in zip(chunk.offsets, chunk.sizes, saved.size, strict=True)
        )
        if not inside or part * saved.properties.dtype.itemsize > place.length:
            raise InvalidCheckpoint(f"{METADATA_NAME} describes parts of {name} that cannot be")
        elements += part
    if elements != math.prod(map(_count, saved.size)):
        raise InvalidCheckpoint(f"{METADATA_NAME} does not say where all of {name} is")


def _count(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise InvalidCheckpoint(
            f"{METADATA_NAME} cannot be understood: a size or a place in a file is no count"
        )
    return number
