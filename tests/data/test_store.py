"""A token store holds exactly its corpus's documents, and what is wrong with its files is named, never believed."""

from __future__ import annotations

import json
import pickle
import random
import tempfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.corpora import SENTENCES, write_texts
from tests.data.stores import content, make_store, write_lines
from trainer.data.errors import SourceFailed
from trainer.data.sources import open_source
from trainer.data.store import TokenStore, open_store
from trainer.data.store_format import METADATA, offsets_file, tokens_file
from trainer.data.stream import Position, TokenStream
from trainer.data.tokenizer import ByteTokenizer, load_tokenizer, train_sentencepiece
from trainer.errors import ConfigurationError

BYTES = ByteTokenizer()


@settings(max_examples=15, deadline=None)
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), min_size=1, max_size=30),
    shard_tokens=st.integers(1, 200),
)
def test_any_documents_in_any_shards_come_back_in_order_and_at_random(
    texts: list[str], shard_tokens: int
) -> None:
    texts = [*texts, "at least one"]
    with tempfile.TemporaryDirectory() as folder:
        write_lines(Path(folder, "x.jsonl"), texts)
        make_store(Path(folder, "store"), "jsonl", Path(folder, "x.jsonl"), shard_tokens=shard_tokens)
        store = open_store(f"{folder}/store")
        expected = [BYTES.encode(text, bos=True, eos=True) if text else [] for text in texts]
        assert [store.read(i).tolist() for i in range(len(store))] == expected
        order = random.Random(0).choices(range(len(texts)), k=20)
        assert [store.read(i).tolist() for i in order] == [expected[i] for i in order]
        assert store.lengths(np.array(order)).tolist() == [len(expected[i]) for i in order]
        assert store.total_tokens == sum(map(len, expected))
        # A shard ends with the document that fills it.
        assert all(shard.tokens >= shard_tokens for shard in store.metadata.shards[:-1])
        assert list(store.damaged_files()) == []


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "arrow"])
def test_training_reads_the_same_stream_from_the_store_as_from_its_source(
    tmp_path: Path, kind: str, shuffle: bool
) -> None:
    texts = [*(f"{i} {text}" for i in range(12) for text in SENTENCES), "", "after an empty one"]
    corpus = _write(tmp_path / "corpus", kind, texts)
    tokenizer = load_tokenizer(train_sentencepiece(texts, 350, tmp_path / "t"))
    make_store(tmp_path / "store", kind, corpus, tokenizer=tmp_path / "t", shard_tokens=300)
    assert len(open_store(str(tmp_path / "store")).metadata.shards) > 2
    text, store = (
        TokenStream(open_source(dataset, str(path)), tokenizer, shuffle, seed=5, epochs=2)
        for dataset, path in ((kind, corpus), ("store", tmp_path / "store"))
    )
    for start in (Position(), Position(0, 7, 3), Position(1, 49, 0)):
        for one, other in zip(text.pieces(start), store.pieces(start), strict=True):
            assert one.start == other.start
            assert one.tokens.tolist() == other.tokens.tolist()


def test_documents_of_a_store_are_views_of_the_file_and_shards_are_mapped_when_read(tmp_path: Path) -> None:
    store = _small(tmp_path)
    assert store._mapped == {}
    list(islice(TokenStream(store, BYTES, epochs=1).pieces(Position()), 2))
    assert list(store._mapped) == [0]
    assert store.read(0).base is not None
    assert not store.read(0).flags.writeable


def test_a_store_goes_to_another_process_as_its_folder(tmp_path: Path) -> None:
    store = _small(tmp_path)
    store.read(3)
    pickled = pickle.dumps(store)
    assert len(pickled) < 500
    assert pickle.loads(pickled).read(3).tolist() == store.read(3).tolist()


def test_numbers_of_two_bytes_where_the_vocabulary_allows(tmp_path: Path) -> None:
    assert _small(tmp_path).read(0).dtype == np.uint16


@pytest.mark.parametrize(
    ("tokenizer", "ends", "words"),
    [
        ("other", {}, "made with another tokenizer"),
        ("byte", {"add_bos": False}, "add_bos = true, data.add_bos is false"),
        ("byte", {"add_eos": False}, "add_eos = true, data.add_eos is false"),
    ],
)
def test_tokens_that_would_mean_something_else_are_refused_in_one_line(
    tmp_path: Path, tokenizer: str, ends: dict[str, bool], words: str
) -> None:
    store = _small(tmp_path)
    other = tokenizer if tokenizer == "byte" else train_sentencepiece(SENTENCES * 5, 350, tmp_path / "t")
    with pytest.raises(ConfigurationError, match=words) as refused:
        TokenStream(store, load_tokenizer(other), **ends)
    assert "\n" not in str(refused.value)


def test_a_store_brings_its_tokenizer_along(tmp_path: Path) -> None:
    model = train_sentencepiece(SENTENCES * 5, 350, tmp_path / "t")
    write_texts(tmp_path / "corpus", SENTENCES)
    make_store(tmp_path / "store", "text", tmp_path / "corpus", tokenizer=model)
    store = open_store(str(tmp_path / "store"))
    store.save_tokenizer(tmp_path / "run")
    store.check(load_tokenizer(tmp_path / "run"), add_bos=True, add_eos=True)


Change = Callable[[Path], object]


def _edit(**values: object) -> Change:
    def change(folder: Path) -> None:
        described = json.loads((folder / METADATA).read_text())
        (folder / METADATA).write_text(json.dumps(described | values))

    return change


def _edit_shard(**values: object) -> Change:
    def change(folder: Path) -> None:
        described = json.loads((folder / METADATA).read_text())
        described["shards"][0] |= values
        for name in ("documents", "tokens"):
            described[name] = sum(shard[name] for shard in described["shards"])
        (folder / METADATA).write_text(json.dumps(described))

    return change


def _link_outside(folder: Path) -> None:
    outside = folder.parent / "secret"
    tokens_file(folder, 0).rename(outside)
    tokens_file(folder, 0).symlink_to(outside)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: tokens_file(folder, 0).unlink(), "00000.tokens: is missing"),
        (lambda folder: offsets_file(folder, 1).write_bytes(b"12"), "00001.offsets: has 2 bytes"),
        (lambda folder: tokens_file(folder, 0).open("ab").write(b"x"), "00000.tokens: has"),
        (_link_outside, "leads out of the store"),
        (lambda folder: (folder / METADATA).unlink(), "holds no store.json"),
        (lambda folder: (folder / METADATA).write_text("{"), "no description of a token store"),
        (lambda folder: (folder / METADATA).write_bytes(b" " * ((64 << 20) + 1)), "larger than"),
        (_edit(version=2), "version"),
        (_edit(dtype="uint32"), "not the type of a vocabulary of 258"),
        (_edit(dtype="object"), "dtype"),
        (_edit(tokens=10**6), "do not hold 1000000 tokens"),
        (_edit(documents=-1), "documents"),
        (_edit(shards=[]), "shards"),
        (_edit(shards=[{"file": "../../etc/passwd"}]), "shards.0"),
        (_edit_shard(tokens=1 << 50), "00000.tokens: has"),
        (_edit_shard(tokens=1 << 63), "tokens: Input should be"),
        (_edit_shard(documents=1 << 50), "00000.offsets: has"),
        (_edit_shard(tokens=1.5), "tokens: Input should be"),
        (_edit_shard(tokens_digest="../x"), "shards.0.tokens_digest"),
    ],
)
def test_a_description_that_lies_is_named_before_anything_is_mapped(
    tmp_path: Path, change: Change, words: str
) -> None:
    folder = _small(tmp_path).folder
    change(folder)
    with pytest.raises(ConfigurationError, match=words.replace(".", r"\.")) as refused:
        open_store(str(folder))
    assert "\n" not in str(refused.value)


def test_any_flipped_bit_is_found_and_its_file_named(tmp_path: Path) -> None:
    store = _small(tmp_path)
    chance = random.Random(0)
    for file in sorted([*store.folder.glob("*.tokens"), *store.folder.glob("*.offsets")]) * 8:
        whole = file.read_bytes()
        held = bytearray(whole)
        held[chance.randrange(len(held))] ^= 1 << chance.randrange(8)
        file.write_bytes(held)
        assert list(open_store(str(store.folder)).damaged_files()) == [file]
        file.write_bytes(whole)


@pytest.mark.parametrize("value", [0, 1 << 40, (1 << 64) - 1])
def test_damaged_offsets_never_lead_outside_the_file(tmp_path: Path, value: int) -> None:
    store = _small(tmp_path)
    offsets = np.fromfile(offsets_file(store.folder, 0), np.uint64)
    offsets[2] = value
    offsets.tofile(offsets_file(store.folder, 0))
    with pytest.raises(SourceFailed, match=r"00000\.offsets: damaged at document [12]"):
        [store.read(i) for i in (1, 2)]
    with pytest.raises(SourceFailed, match=r"00000\.offsets: damaged at document [12]"):
        store.lengths(np.array([0, 1, 2]))


def test_a_copy_of_a_store_has_the_same_bytes_and_fingerprint(tmp_path: Path) -> None:
    first, second = _small(tmp_path / "a"), _small(tmp_path / "b")
    assert first.fingerprint == second.fingerprint
    mine, theirs = content(first.folder), content(second.folder)
    assert {k: v for k, v in mine.items() if k != METADATA} == {
        k: v for k, v in theirs.items() if k != METADATA
    }


def _small(folder: Path) -> TokenStore:
    write_texts(folder / "corpus", SENTENCES * 2)
    make_store(folder / "store", "text", folder / "corpus", shard_tokens=150)
    return open_store(str(folder / "store"))


def _write(folder: Path, kind: str, texts: list[str]) -> Path:
    if kind == "text":
        return write_texts(folder, texts)
    if kind == "jsonl":
        return write_lines(folder / "x.jsonl", texts)
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    table = pa.table({"text": texts, "other": range(len(texts))})
    if kind == "parquet":
        pq.write_table(table, folder / "x.parquet", row_group_size=7)
    else:
        with pa.OSFile(str(folder / "x.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as out:
            out.write_table(table, max_chunksize=7)
    return folder
