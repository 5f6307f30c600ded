"""A checkpoint from somebody hostile runs nothing, leads nowhere and takes no more memory than its files have bytes."""

from __future__ import annotations

import io
import json
import os
import pickle
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from tests.checkpoint.tiny import Layout, Run, manager
from trainer.checkpoint.manifest import (
    MANIFEST_NAME,
    Contents,
    FileEntry,
    InvalidCheckpoint,
    Manifest,
    read_manifest,
)
from trainer.checkpoint.metadata import METADATA_NAME
from trainer.checkpoint.storage import CheckpointReader

DATA = "__0_0.distcp"


@pytest.fixture
def step(tmp_path: Path) -> Path:
    run = Run(Layout(), 0)
    run.train(2)
    assert manager(tmp_path).save(2, run.state) is not None
    return tmp_path / "step-2"


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "..", ".", "", "a\\b", "a\0b"])
def test_a_manifest_names_files_of_its_own_folder_only(step: Path, name: str) -> None:
    (step.parent / "secret").write_text("x" * 10)
    hostile = Manifest(2, Contents.FULL, "", 1, (FileEntry(name, 10, "0" * 64),))
    (step / MANIFEST_NAME).write_text(hostile.to_json())
    with pytest.raises(InvalidCheckpoint, match="leads out of the checkpoint"):
        read_manifest(step)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_not_a_regular_file_is_not_read(step: Path, kind: str) -> None:
    size = (step / DATA).stat().st_size
    (step / DATA).rename(step.parent / "elsewhere")
    match kind:
        case "link":
            (step / DATA).symlink_to(step.parent / "elsewhere")
        case "pipe":
            os.mkfifo(step / DATA)
        case "folder":
            (step / DATA).mkdir()
    assert size
    with pytest.raises(InvalidCheckpoint, match=f"{DATA} is missing"):
        read_manifest(step)


def test_a_manifest_larger_than_any_is_not_read(step: Path) -> None:
    os.truncate(step / MANIFEST_NAME, 2**40)  # a hole: no disk, but memory if it were read
    with pytest.raises(InvalidCheckpoint, match=r"manifest of 1099511627776 bytes"):
        read_manifest(step)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"format_version": 2, "step": ' + "9" * 10_000 + "}", "[]", "0"]
)
def test_a_manifest_that_is_json_of_any_kind_is_invalid_and_nothing_worse(step: Path, text: str) -> None:
    (step / MANIFEST_NAME).write_text(text)
    with pytest.raises(InvalidCheckpoint):
        read_manifest(step)


@pytest.mark.parametrize(
    ("key", "value"), [("step", True), ("step", -1), ("world_size", "1"), ("layout", 1), ("step", 1.0)]
)
def test_numbers_of_a_manifest_are_counts_and_texts_are_texts(step: Path, key: str, value: Any) -> None:
    fields = json.loads((step / MANIFEST_NAME).read_text())
    (step / MANIFEST_NAME).write_text(json.dumps({**fields, key: value}))
    with pytest.raises(InvalidCheckpoint, match="cannot be understood"):
        read_manifest(step)


# Metadata


def change(step: Path, how: Callable[[Metadata], None]) -> None:
    """Rewrite the metadata with something in it changed."""
    metadata = pickle.loads((step / METADATA_NAME).read_bytes())
    how(metadata)
    (step / METADATA_NAME).write_bytes(pickle.dumps(metadata))


def larger_tensor(metadata: Metadata) -> None:
    metadata.state_dict_metadata["rng.rank_0"].size = torch.Size([10**15])


def larger_part(metadata: Metadata) -> None:
    saved = metadata.state_dict_metadata["rng.rank_0"]
    saved.size = saved.chunks[0].sizes = torch.Size([10**15])


def empty_parts(metadata: Metadata) -> None:
    metadata.state_dict_metadata["rng.rank_0"].chunks = []


def beyond_the_file(metadata: Metadata) -> None:
    next(iter(metadata.storage_data.values())).offset = 10**9


def the_same_bytes_again_and_again(metadata: Metadata) -> None:
    for place in metadata.storage_data.values():
        place.offset, place.length = 0, 10_000


def negative(metadata: Metadata) -> None:
    next(iter(metadata.storage_data.values())).offset = -1


def no_number(metadata: Metadata) -> None:
    next(iter(metadata.storage_data.values())).length = "many"


def compressed(metadata: Metadata) -> None:
    next(iter(metadata.storage_data.values())).transform_descriptors = ["zstd"]


def another_file(metadata: Metadata) -> None:
    next(iter(metadata.storage_data.values())).relative_path = "other.distcp"


@pytest.mark.parametrize(
    "how",
    [
        larger_tensor,
        larger_part,
        empty_parts,
        beyond_the_file,
        the_same_bytes_again_and_again,
        negative,
        no_number,
        compressed,
        another_file,
    ],
    ids=lambda how: how.__name__,
)
def test_metadata_that_the_files_do_not_bear_out_is_refused(
    step: Path, how: Callable[[Metadata], None]
) -> None:
    change(step, how)
    with pytest.raises(InvalidCheckpoint, match=r"^\.metadata"):
        CheckpointReader(step)


def build_on_a_class() -> bytes:
    """Unpickled as it is meant, it would give the class Metadata an attribute."""
    module = "torch.distributed.checkpoint.metadata"
    parts = [
        b"\x80\x04",
        pickle.SHORT_BINUNICODE,
        bytes([len(module)]),
        module.encode(),
        pickle.SHORT_BINUNICODE,
    ]
    parts += [b"\x08Metadata", pickle.STACK_GLOBAL, pickle.NONE, pickle.EMPTY_DICT, pickle.SHORT_BINUNICODE]
    parts += [b"\x08harmless", pickle.NEWFALSE, pickle.SETITEM, pickle.TUPLE2, pickle.BUILD, pickle.STOP]
    return b"".join(parts)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (build_on_a_class(), "changes what is no description"),
        (
            b"\x80\x04" + pickle.NONE + pickle.LONG_BINPUT + b"\xff\xff\xff\x7f" + pickle.STOP,
            "cannot be read",
        ),
        (b"\x80\x04" + pickle.BINBYTES8 + b"\xff" * 7 + b"\x00" + pickle.STOP, "cannot be read"),
        (b"\x80\x04" + pickle.BINUNICODE + b"\xff\xff\xff\x7f" + b"x" + pickle.STOP, "cannot be read"),
        (pickle.dumps({"a": 1}), "does not describe a checkpoint"),
        (b"", "cannot be read"),
    ],
    ids=["class", "memo", "bytes", "text", "dictionary", "empty"],
)
def test_metadata_does_what_descriptions_need_and_nothing_else(step: Path, text: bytes, why: str) -> None:
    (step / METADATA_NAME).write_bytes(text)
    with pytest.raises(InvalidCheckpoint, match=why):
        CheckpointReader(step)
    assert not hasattr(Metadata, "harmless")


# Tensors


class AttributeOf:
    """Pickled as a call of getattr."""

    def __init__(self, of: object, name: str) -> None:
        self.arguments = of, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self.arguments


def test_an_enumeration_as_the_first_releases_of_python_3_11_write_it_is_read_and_no_other_attribute(
    step: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = pickle.loads((step / METADATA_NAME).read_bytes())
    with monkeypatch.context() as patched:
        as_then = lambda member, _protocol: (getattr, (type(member), member.name))  # noqa: E731
        patched.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", as_then)
        written = pickle.dumps(metadata)
    assert b"getattr" in written
    (step / METADATA_NAME).write_bytes(written)
    CheckpointReader(step)
    (step / METADATA_NAME).write_bytes(pickle.dumps(AttributeOf(Metadata, "__init__")))
    with pytest.raises(InvalidCheckpoint, match="getattr does not belong"):
        CheckpointReader(step)


def test_a_tensor_that_unpacks_to_far_more_than_the_file_is_not_unpacked(step: Path) -> None:
    reader = CheckpointReader(step)
    packed = _packed()
    index, place = next((i, p) for i, p in reader._metadata.storage_data.items() if p.length >= len(packed))
    content = bytearray((step / DATA).read_bytes())
    content[place.offset : place.offset + place.length] = packed.rjust(place.length, b"\0")
    (step / DATA).write_bytes(content)
    with pytest.raises(InvalidCheckpoint, match="compressed"):
        reader.read_part(index)


def _packed() -> bytes:
    """A tensor of a megabyte of zeros, saved and then compressed to about a kilobyte."""
    saved, packed = io.BytesIO(), io.BytesIO()
    torch.save(torch.zeros(2**18), saved)
    with zipfile.ZipFile(saved) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            if name.endswith(("data.pkl", "data/0", "version")):
                target.writestr(name, source.read(name))
    return packed.getvalue()


def test_files_have_the_permissions_that_the_user_wants(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        run = Run(Layout(), 0)
        run.train()
        checkpoints = manager(tmp_path / "checkpoint", async_mode="async", interval=1)
        checkpoints.maybe_save(1, run.state)
        checkpoints.complete()
    finally:
        os.umask(before)
    folder = tmp_path / "checkpoint" / "step-1"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o750
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o640}
