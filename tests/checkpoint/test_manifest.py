"""A checkpoint is valid only if its manifest and all its files are as they were written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.checkpoint.manifest import (
    MANIFEST_NAME,
    Contents,
    FileEntry,
    InvalidCheckpoint,
    Manifest,
    checksum_problems,
    describe_files,
    is_plain,
    read_manifest,
    write_manifest,
)


def make(folder: Path) -> Manifest:
    folder.mkdir(parents=True)
    for name, contents in {"__0_0.distcp": b"weights", ".metadata": b"names"}.items():
        (folder / name).write_bytes(contents)
    manifest = Manifest(
        7, Contents.FULL, "pipeline 1", 1, describe_files(folder, ["__0_0.distcp", ".metadata"])
    )
    write_manifest(folder, manifest)
    return manifest


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    manifest = make(tmp_path / "step-7")
    assert read_manifest(tmp_path / "step-7") == manifest
    assert checksum_problems(tmp_path / "step-7", manifest.files) == ()


@given(
    st.builds(
        Manifest,
        step=st.integers(0),
        contents=st.sampled_from(Contents),
        layout=st.text(),
        world_size=st.integers(1),
        files=st.lists(
            st.builds(FileEntry, st.text().filter(is_plain), st.integers(0), st.text()), max_size=3
        ).map(tuple),
    )
)
def test_every_manifest_survives_json(manifest: Manifest) -> None:
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_a_folder_without_manifest_is_an_unfinished_save(tmp_path: Path) -> None:
    make(tmp_path / "step-7")
    (tmp_path / "step-7" / MANIFEST_NAME).unlink()
    with pytest.raises(InvalidCheckpoint, match="did not finish"):
        read_manifest(tmp_path / "step-7")


@pytest.mark.parametrize("keep", [0, 1, 40, -2])
def test_a_manifest_cut_short_is_invalid(tmp_path: Path, keep: int) -> None:
    make(tmp_path / "step-7")
    path = tmp_path / "step-7" / MANIFEST_NAME
    path.write_text(path.read_text()[:keep])
    with pytest.raises(InvalidCheckpoint, match="cannot be understood"):
        read_manifest(tmp_path / "step-7")


@given(
    st.recursive(
        st.none() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_any_other_json_is_invalid_and_nothing_worse(document: object) -> None:
    with pytest.raises(InvalidCheckpoint):
        Manifest.from_json(json.dumps(document))


def test_a_manifest_of_a_later_format_is_refused_by_its_version(tmp_path: Path) -> None:
    make(tmp_path / "step-7")
    path = tmp_path / "step-7" / MANIFEST_NAME
    path.write_text(path.read_text().replace('"format_version": 2', '"format_version": 3'))
    with pytest.raises(InvalidCheckpoint, match="format version 3, this program reads 2"):
        read_manifest(tmp_path / "step-7")


def test_a_missing_file_and_a_truncated_one_are_named(tmp_path: Path) -> None:
    make(tmp_path / "step-7")
    (tmp_path / "step-7" / ".metadata").unlink()
    (tmp_path / "step-7" / "__0_0.distcp").write_bytes(b"weigh")
    with pytest.raises(
        InvalidCheckpoint, match=r"__0_0\.distcp has 5 bytes instead of 7; \.metadata is missing"
    ):
        read_manifest(tmp_path / "step-7")


def test_a_flipped_bit_is_found_by_the_checksum(tmp_path: Path) -> None:
    manifest = make(tmp_path / "step-7")
    (tmp_path / "step-7" / "__0_0.distcp").write_bytes(b"weightz")
    read_manifest(tmp_path / "step-7")
    assert checksum_problems(tmp_path / "step-7", manifest.files) == (
        "__0_0.distcp is damaged: its checksum differs",
    )


def test_no_manifest_is_written_for_files_that_are_not_there(tmp_path: Path) -> None:
    entry = FileEntry("__1_0.distcp", 5, "0" * 64)
    with pytest.raises(InvalidCheckpoint, match="same file system"):
        write_manifest(tmp_path, Manifest(1, Contents.FULL, "", 2, (entry,)))
    assert list(tmp_path.iterdir()) == []
