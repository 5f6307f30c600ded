"""`stageline prepare --tokenizer`: the same bytes whatever the workers and interruptions; bad data is named."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.corpora import SENTENCES, ListStream, write_texts
from tests.data.stores import content, make_store, write_lines
from trainer.commands.prepare import run
from trainer.data import corpora, store_writer
from trainer.data.corpora import StreamCorpus
from trainer.data.corpus import Unit
from trainer.data.preparation import BadDocument, OnError, Preparation, prepare
from trainer.data.store import open_store
from trainer.data.store_format import BAD_DOCUMENTS, METADATA, PROGRESS
from trainer.data.tokenizer import ByteTokenizer
from trainer.data.tokenizing import WorkerDied
from trainer.errors import ConfigurationError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units of a few lines."""
    monkeypatch.setattr(corpora, "UNIT_BYTES", 300)


@pytest.mark.parametrize("kind", ["text", "jsonl", "gz", "stream"])
def test_the_store_is_the_same_for_one_two_and_three_processes(tmp_path: Path, kind: str) -> None:
    made = [tmp_path / f"store{workers}" for workers in (1, 2, 3)]
    for workers, output in enumerate(made, start=1):
        prepare(_wanted(tmp_path, kind, output, workers))
    assert len(open_store(str(made[0])).metadata.shards) > 3
    assert content(made[0]) == content(made[1]) == content(made[2])


class Interrupted(BaseException):
    """Stands for whatever ends a run."""


@pytest.mark.parametrize("kind", ["text", "jsonl", "gz", "stream"])
def test_interrupted_after_any_unit_it_goes_on_and_makes_the_same_store(tmp_path: Path, kind: str) -> None:
    prepare(_wanted(tmp_path, kind, tmp_path / "straight"))
    output = tmp_path / "output"
    interruptions = 0
    while not (output / METADATA).exists():
        wanted = _wanted(tmp_path, kind, output)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store_writer, "_SECONDS_BETWEEN_COMMITS", 0.0)
            patch.setattr(type(wanted.corpus), "units", _at_most(2, type(wanted.corpus).units))
            try:
                assert prepare(wanted).resumed_at > 0
            except Interrupted:
                interruptions += 1
                # What was written after the last word about it does not count.
                last = max(output.glob("*.tokens"))
                for torn in (last, last.with_suffix(".offsets"), output / BAD_DOCUMENTS):
                    with torn.open("ab") as file:
                        file.write(b"torn")
                (output / f"{int(last.stem) + 1:05d}.tokens").write_bytes(b"torn")
                with pytest.raises(ConfigurationError, match="is unfinished"):
                    open_store(str(output))
    assert interruptions > 2
    assert content(output) == content(tmp_path / "straight")


@pytest.mark.slow
def test_killed_at_random_moments_and_run_again_it_makes_the_same_store(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    texts = [" ".join(SENTENCES * (1 + i % 5)) for i in range(3000)]
    write_lines(corpus / "a.jsonl", texts)
    (corpus / "b.jsonl").write_bytes((corpus / "a.jsonl").read_bytes() + b"{broken\n")
    chance = random.Random(7)
    outputs = tmp_path / "straight", tmp_path / "killed"
    began = time.monotonic()
    assert _start(corpus, outputs[0]).wait(60) == 0
    whole = time.monotonic() - began
    kills = 0
    while not (outputs[1] / METADATA).exists():
        started = _start(corpus, outputs[1])
        try:
            # Later and later, so that the drill ends even where a machine gets slower.
            started.wait(whole * (0.4 + 0.1 * kills) * chance.uniform(0.8, 1.2))
        except subprocess.TimeoutExpired:
            started.kill()
            kills += 1
        started.wait(20)
        _wait_for_nobody(outputs[1])
    assert kills
    assert content(outputs[0]) == content(outputs[1])


def test_terminated_it_ends_with_exit_code_3_and_the_same_command_goes_on(tmp_path: Path) -> None:
    corpus = write_lines(tmp_path / "x.jsonl", SENTENCES * 20_000)
    started = _start(corpus, tmp_path / "o")
    while not (tmp_path / "o" / PROGRESS).exists():
        assert started.poll() is None
        time.sleep(0.01)
    started.send_signal(signal.SIGTERM)
    assert started.wait(30) == 3
    _wait_for_nobody(tmp_path / "o")
    assert not (tmp_path / "o" / METADATA).exists()


def test_a_process_that_is_killed_is_reported_and_does_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = _wanted(tmp_path, "jsonl", tmp_path / "o", workers=2)
    deadly = [Killing(), *islice(wanted.corpus.units(0, 0), 20)]
    monkeypatch.setattr(type(wanted.corpus), "units", lambda *_: iter(deadly))
    with pytest.raises(WorkerDied, match="fewer --workers"):
        prepare(wanted)


class Killing(Unit):
    """Ends the process that reads it."""

    size = 0

    def documents(self) -> Iterator[None]:  # type: ignore[override]
        os.kill(os.getpid(), signal.SIGKILL)
        yield None


def test_a_finished_store_is_left_as_it_is(tmp_path: Path) -> None:
    prepare(_wanted(tmp_path, "jsonl", tmp_path / "o"))
    before = content(tmp_path / "o")
    assert prepare(_wanted(tmp_path, "jsonl", tmp_path / "o")).tokens == 0
    assert content(tmp_path / "o") == before


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    prepare(_wanted(tmp_path, "jsonl", tmp_path / "o"))
    with pytest.raises(ConfigurationError, match="another source fingerprint"):
        prepare(_wanted(tmp_path, "text", tmp_path / "o"))
    with pytest.raises(ConfigurationError, match="another shard tokens"):
        make_store(tmp_path / "o", "jsonl", tmp_path / "lines.jsonl", shard_tokens=5)
    (tmp_path / "o" / METADATA).unlink()
    with pytest.raises(ConfigurationError, match=r"neither store\.json nor progress\.json"):
        prepare(_wanted(tmp_path, "jsonl", tmp_path / "o"))


def test_two_at_once_in_one_folder_are_refused(tmp_path: Path) -> None:
    wanted = _wanted(tmp_path, "jsonl", tmp_path / "o")
    with pytest.raises(ConfigurationError, match="another `stageline prepare` is writing here"):
        prepare(wanted, lambda _: prepare(wanted) and None)


LINES = [
    b'{"text": "fine"}\n',
    b"\n",
    b'{"text": "broken\n',
    b'{"text": ""}\n',
    b'{"text": null}\n',
    b'{"other": "x"}\n',
    b'{"text": 5}\n',
    b"[1]\n",
    b'{"text": "bad \xff byte"}\n',
    b'{"text": "half \\ud800 pair"}\n',
    b"[" * 100_000 + b"\n",
    b'{"text": "' + b"long " * 2_000_000 + b'"}\n',
    b'{"text": "no line end"}',
]


@pytest.mark.parametrize("compressed", [False, True])
def test_bad_lines_are_counted_and_listed_with_file_and_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compressed: bool
) -> None:
    monkeypatch.setattr(corpora, "UNIT_BYTES", 1 << 16)  # the long line lies across many
    file = tmp_path / ("x.jsonl.gz" if compressed else "x.jsonl")
    file.write_bytes(gzip.compress(b"".join(LINES), 1) if compressed else b"".join(LINES))
    made = make_store(tmp_path / "o", "jsonl", file).metadata
    assert made.documents == 12  # a blank line is none
    assert made.bad_documents == {"broken UTF-8": 2, "broken line": 3, "empty": 2, "no text": 2}
    store = open_store(str(tmp_path / "o"))
    decoded = [ByteTokenizer().decode(store.read(i).tolist()) for i in range(12)]
    assert decoded[:10] == ["fine", *[""] * 6, "bad \ufffd byte", "half \ufffd pair", ""]
    assert decoded[10] == "long " * 2_000_000
    assert decoded[11] == "no line end"
    listed = [json.loads(line) for line in (tmp_path / "o" / BAD_DOCUMENTS).open()]
    assert {one["file"] for one in listed} == {str(file)}
    place = "line 3" if compressed else f"byte {len(LINES[0]) + 1}"
    assert listed[0]["position"] == place
    assert "JSONDecodeError" in listed[0]["reason"]


def test_stop_ends_at_the_first_bad_document_and_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(b'{"text": "fine"}\n' * 50 + b"{broken\n" + b'{"text": "fine"}\n' * 50)
    with pytest.raises(BadDocument, match=r"x\.jsonl, byte 850: broken line"):
        make_store(tmp_path / "o", "jsonl", file, on_error=OnError.STOP)
    arguments = ["--tokenizer", "byte", "--workers", "1", "--dataset", "jsonl", "--dataset-path", str(file)]
    arguments += ["--output", str(tmp_path / "o")]
    arguments += ["--shard-tokens", str(1 << 20)]
    assert run([*arguments, "--on-error", "stop"]) == 2
    assert "x.jsonl, line 51 (byte 850)" in capsys.readouterr().err
    assert run(arguments) == 0  # goes on, and past it
    assert "1 broken line" in capsys.readouterr().out
    assert len(open_store(str(tmp_path / "o"))) == 101


def test_bad_text_files_are_counted(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "corpus", [SENTENCES[0], ""])
    (folder / "bad.txt").write_bytes(b"abc\xffdef")
    (folder / "long.txt").write_bytes(b"line\n" * 2_000_000)
    made = make_store(tmp_path / "o", "text", folder).metadata
    assert made.bad_documents == {"broken UTF-8": 1, "empty": 1}
    assert made.documents == 3 + 3  # 10 MB are three documents of at most 4 MiB
    listed = [json.loads(line) for line in (tmp_path / "o" / BAD_DOCUMENTS).open()]
    assert [Path(one["file"]).name for one in listed] == ["0001.txt", "bad.txt"]
    assert listed[1]["position"] == "byte 3"


def test_an_unreadable_row_group_is_left_out_and_the_others_are_read(tmp_path: Path) -> None:
    file = tmp_path / "x.parquet"
    table = pa.table({"text": [f"{i} {SENTENCES[0] * 20}" for i in range(30)]})
    pq.write_table(
        table, file, row_group_size=10, compression="zstd", use_dictionary=False, write_page_checksum=True
    )
    held = bytearray(file.read_bytes())
    column = pq.read_metadata(file).row_group(1).column(0)
    held[column.data_page_offset + column.total_compressed_size - 20] ^= 1
    file.write_bytes(held)
    made = make_store(tmp_path / "o", "parquet", file).metadata
    assert made.bad_documents == {"unreadable": 1}
    assert made.documents == 20
    assert json.loads((tmp_path / "o" / BAD_DOCUMENTS).read_text())["position"] == "row group 1"


@pytest.mark.parametrize("kind", ["jsonl.gz", "parquet", "arrow"])
def test_files_that_are_empty_or_cut_off_are_named_and_the_others_are_read(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    texts = [f"{i} {random.Random(i).random()}" for i in range(3000)]
    if kind == "jsonl.gz":
        write_lines(tmp_path / "x.jsonl", texts)
        whole = gzip.compress((tmp_path / "x.jsonl").read_bytes())
    elif kind == "parquet":
        pq.write_table(pa.table({"text": texts}), tmp_path / "x")
        whole = (tmp_path / "x").read_bytes()
    else:
        table = pa.table({"text": texts})
        with pa.OSFile(str(tmp_path / "x"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as out:
            out.write_table(table, max_chunksize=100)
        whole = (tmp_path / "x").read_bytes()
    (folder / f"a.{kind}").write_bytes(b"")
    (folder / f"b.{kind}").write_bytes(whole[: len(whole) // 2])
    (folder / f"c.{kind}").write_bytes(whole)
    made = make_store(tmp_path / "o", kind.split(".")[0], folder).metadata
    assert made.documents >= 3000
    listed = [json.loads(line) for line in (tmp_path / "o" / BAD_DOCUMENTS).open()]
    assert [Path(one["file"]).name for one in listed if one["fault"] == "unreadable"] == [
        f"a.{kind}",
        f"b.{kind}",
    ]


def test_a_wrong_column_and_a_corpus_without_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"body": "abc"}\n' * 3)
    with pytest.raises(ConfigurationError, match='no "text"; it has body'):
        make_store(tmp_path / "o", "jsonl", tmp_path / "x.jsonl")
    (tmp_path / "x.jsonl").write_text('{"text": ""}\n' * 3)
    with pytest.raises(ConfigurationError, match="none of the documents holds text"):
        make_store(tmp_path / "o", "jsonl", tmp_path / "x.jsonl")


@pytest.mark.parametrize(
    ("dataset", "words"), [("chat", "tokenized while training"), ("store", "tokens already")]
)
def test_what_cannot_become_a_store_is_refused(tmp_path: Path, dataset: str, words: str) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    with pytest.raises(ConfigurationError, match=words):
        make_store(tmp_path / "o", dataset, tmp_path / "x.jsonl")


def test_the_command_makes_and_verifies_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_texts(tmp_path / "corpus", SENTENCES)
    arguments = ["--tokenizer", "byte", "--workers", "1", "--dataset", "text", "--dataset-path"]
    assert run([*arguments, str(tmp_path / "corpus"), "--output", str(tmp_path / "o")]) == 0
    assert "4 documents" in capsys.readouterr().out
    assert run(["--verify", str(tmp_path / "o")]) == 0
    damaged = tmp_path / "o" / "00000.tokens"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    assert run(["--verify", str(tmp_path / "o")]) == 1
    assert capsys.readouterr().err == f"{damaged}: damaged\n"


def _wanted(folder: Path, kind: str, output: Path, workers: int = 1) -> Preparation:
    """A preparation of 60 documents, some of them empty or broken."""
    texts = [f"{i} {SENTENCES[i % 4]}" if i % 9 else "" for i in range(60)]
    if kind == "stream":
        return Preparation(StreamCorpus(ListStream(texts)), "byte", output, workers, shard_tokens=500)
    if kind == "text":
        path = write_texts(folder / "texts", texts)
    else:
        path = write_lines(folder / "lines.jsonl", texts)
        with path.open("ab") as file:
            file.write(b"{broken\n")
        if kind == "gz":
            path, plain = path.with_suffix(".jsonl.gz"), path
            path.write_bytes(gzip.compress(plain.read_bytes(), mtime=0))
    corpus = corpora.open_corpus("jsonl" if kind == "gz" else kind, str(path), "text")
    return Preparation(corpus, "byte", output, workers, shard_tokens=500)


def _at_most(count: int, units):  # type: ignore[no-untyped-def]
    """The method, interrupted after so many units if there are more."""

    def limited(self, done: int, documents: int) -> Iterator[Unit]:  # type: ignore[no-untyped-def]
        for number, unit in enumerate(units(self, done, documents)):
            if number == count:
                raise Interrupted
            yield unit

    return limited


def _start(corpus: Path, output: Path) -> subprocess.Popen[bytes]:
    code = (
        "import sys; from trainer.data import store_writer; store_writer._SECONDS_BETWEEN_COMMITS = 0.05;"
        "from trainer.commands.prepare import run; sys.exit(run(sys.argv[1:]))"
    )
    arguments = ["--tokenizer", "byte", "--workers", "2", "--dataset", "jsonl", "--dataset-path", str(corpus)]
    arguments += ["--output", str(output), "--shard-tokens", "400000"]
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _wait_for_nobody(output: Path) -> None:
    """Until no process works for this output any more: those of a killed one end by themselves."""
    deadline = time.monotonic() + 20
    while subprocess.run(["pgrep", "-f", str(output)], capture_output=True).returncode == 0:
        assert time.monotonic() < deadline, "a process outlives the one that started it"
        time.sleep(0.05)
