"""Megatron's indexed data sets are read as they are; an index that lies is refused before it is mapped, or named."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from trainer.data.errors import SourceFailed
from trainer.data.megatron import open_megatron
from trainer.data.sources import open_source
from trainer.data.stream import Position, TokenStream
from trainer.data.tokenizer import ByteTokenizer
from trainer.errors import ConfigurationError

DOCUMENTS = [[1, 2, 3], [], [300, 5], list(range(40))]


@pytest.mark.parametrize("ending", ["", ".bin", ".idx"])
@pytest.mark.parametrize(("code", "dtype"), [(8, "<u2"), (4, "<i4")])
def test_documents_come_back_whichever_of_its_names_is_given(
    tmp_path: Path, code: int, dtype: str, ending: str
) -> None:
    write(tmp_path / "my.data", DOCUMENTS, code, dtype)
    data = open_source("megatron", f"{tmp_path}/my.data{ending}")
    assert [data.read(i).tolist() for i in range(len(data))] == DOCUMENTS
    assert data.lengths(np.array([3, 0, 1])).tolist() == [40, 3, 0]
    assert data.total_tokens == 45
    assert pickle.loads(pickle.dumps(data)).read(2).tolist() == [300, 5]
    pieces = TokenStream(data, ByteTokenizer(), epochs=1).pieces(Position(0, 1, 0))
    assert [piece.tokens.tolist() for piece in pieces] == [DOCUMENTS[2], DOCUMENTS[3]]


def test_a_byte_for_each_sequence_may_follow_the_index(tmp_path: Path) -> None:
    write(tmp_path / "x", DOCUMENTS, 8, "<u2")
    with (tmp_path / "x.idx").open("ab") as index:
        index.write(bytes(len(DOCUMENTS)))
    assert open_megatron(f"{tmp_path}/x").read(0).tolist() == DOCUMENTS[0]


@pytest.mark.parametrize(
    ("at", "content", "words"),
    [
        (0, b"GARBAGE", "no index of a Megatron data set"),
        (9, struct.pack("<Q", 2), "version 2"),
        (17, b"\x63", "type 99"),
        (18, struct.pack("<Q", 1 << 60), "has .* bytes, 1152921504606846976 sequences need"),
        (18, struct.pack("<Q", 0), "0 sequences"),
        (26, struct.pack("<Q", 1 << 63), "has .* bytes"),
    ],
)
def test_a_header_that_lies_is_refused_before_anything_is_mapped(
    tmp_path: Path, at: int, content: bytes, words: str
) -> None:
    write(tmp_path / "x", DOCUMENTS, 8, "<u2")
    _overwrite(tmp_path / "x.idx", at, content)
    with pytest.raises(ConfigurationError, match=words):
        open_megatron(f"{tmp_path}/x.idx")


@pytest.mark.parametrize(
    ("at", "content"),
    [
        (34, struct.pack("<i", -5)),
        (34, struct.pack("<i", 2**31 - 1)),
        (34 + 16, struct.pack("<q", -2)),
        (34 + 16, struct.pack("<q", 3)),
        (34 + 16, struct.pack("<q", 2**62)),
    ],
)
def test_a_damaged_entry_is_named_and_leads_nowhere(tmp_path: Path, at: int, content: bytes) -> None:
    write(tmp_path / "x", DOCUMENTS, 8, "<u2")
    _overwrite(tmp_path / "x.idx", at, content)
    with pytest.raises(SourceFailed, match="the index is damaged at sequence 0"):
        open_megatron(f"{tmp_path}/x.idx").read(0)


@pytest.mark.parametrize("missing", ["x.bin", "x.idx"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    write(tmp_path / "x", DOCUMENTS, 8, "<u2")
    (tmp_path / missing).unlink()
    with pytest.raises(ConfigurationError, match=f"{missing}: cannot be read: No such file"):
        open_megatron(f"{tmp_path}/x")


def write(prefix: Path, documents: Sequence[Sequence[int]], code: int, dtype: str) -> None:
    """As Megatron-LM's IndexedDatasetBuilder does, a sequence for each document."""
    size = np.dtype(dtype).itemsize
    lengths = [len(document) for document in documents]
    pointers = [size * sum(lengths[:i]) for i in range(len(documents))]
    boundaries = range(len(documents) + 1)
    prefix.with_name(f"{prefix.name}.bin").write_bytes(
        b"".join(np.array(document, dtype).tobytes() for document in documents)
    )
    prefix.with_name(f"{prefix.name}.idx").write_bytes(
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, code, len(documents), len(boundaries))
        + np.array(lengths, "<i4").tobytes()
        + np.array(pointers, "<i8").tobytes()
        + np.array(boundaries, "<i8").tobytes()
    )


def _overwrite(file: Path, at: int, content: bytes) -> None:
    held = bytearray(file.read_bytes())
    held[at : at + len(content)] = content
    file.write_bytes(held)
