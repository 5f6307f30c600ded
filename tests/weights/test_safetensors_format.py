"""Safetensors files by hand: the library reads what is written, and what it writes is read; nothing else is believed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save
from torch import Tensor

from trainer.checkpoint.digest import HashingFile, checksum, sha256
from trainer.errors import ConfigurationError
from trainer.weights.safetensors_format import Planned, header, read_header
from trainer.weights.tensor_file import DTYPE_NAMES, data_of, read_region

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def values(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


@st.composite
def regions(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """A shape, and the offsets and lengths of a part of it."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    lengths = tuple(draw(st.integers(0, size - o)) for size, o in zip(shape, offsets, strict=True))
    return shape, offsets, lengths


@settings(max_examples=60, deadline=None)
@given(region=regions(), dtype=st.sampled_from(DTYPES))
def test_any_part_of_a_tensor_that_the_library_wrote_is_read(
    tmp_path_factory: pytest.TempPathFactory,
    region: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]],
    dtype: torch.dtype,
) -> None:
    shape, offsets, lengths = region
    path = tmp_path_factory.mktemp("file") / "x.safetensors"
    whole = values(shape, dtype)
    path.write_bytes(save({"before": values((3,), torch.float32), "x": whole, "z": values((2,), dtype)}))
    part = read_region(path, read_header(path)["x"], offsets, lengths)
    assert part.dtype == dtype
    assert torch.equal(part, whole[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))])


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    tensors = {f"t{i}.{dtype}": values((3, 2 + i), dtype) for i, dtype in enumerate(DTYPES)}
    path = tmp_path / "x.safetensors"
    with path.open("wb") as stream, HashingFile(stream, sha256()) as file:
        planned = [Planned(n, DTYPE_NAMES[t.dtype], tuple(t.shape)) for n, t in tensors.items()]
        file.write(header(planned))
        for tensor in tensors.values():
            file.write(data_of(tensor))
        assert file.finish() == checksum(path, sha256)
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    assert read_header(path).keys() == tensors.keys()


def entry(**changed: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **changed}


def raw(table: Any, data: int = 16, length: int | None = None) -> bytes:
    text = table.encode() if isinstance(table, str) else json.dumps(table).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "does not fit into the file"),
        (raw({"x": entry()}, length=10**18), "does not fit into the file"),
        (raw({"x": entry()}, length=2**63 - 1), "does not fit into the file"),
        (raw("[" * 100_000), "no table of tensors"),
        (raw("[]"), "no table of tensors"),
        (
            raw('{"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, "x": {}}'),
            "a name occurs twice",
        ),
        (raw({"x": entry(shape=[2, 3])}), "has 16 bytes, its shape [2, 3] in F32 needs 24"),
        (raw({"x": entry(shape=[2**62, 2**62])}), "has 16 bytes"),
        (raw({"x": entry(dtype="F65")}), "the unknown dtype 'F65'"),
        (raw({"x": entry(shape=[-2, -2])}), "no whole numbers"),
        (raw({"x": entry(shape=[2.0, 2])}), "no whole numbers"),
        (raw({"x": entry(data_offsets=[0, 16, 32])}), "lacks dtype, shape or data_offsets"),
        (raw({"x": 7}), "lacks dtype, shape or data_offsets"),
        (raw({"x": entry()}, data=12), "end at byte"),
        (raw({"x": entry()}, data=20), "end at byte"),
        (raw({"x": entry(data_offsets=[16, 32])}, data=32), "leave a gap"),
        (raw({"x": entry(), "y": entry(data_offsets=[8, 24])}, data=24), "overlap"),
    ],
)
def test_a_file_that_lies_is_refused_in_one_line_that_names_it(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    path = tmp_path / "lies.safetensors"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError) as caught:
        read_header(path)
    text = str(caught.value)
    assert str(path) in text
    assert "\n" not in text
    assert reason.replace("end at byte", "end at byte") in text
