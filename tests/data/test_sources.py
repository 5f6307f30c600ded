"""Sources: every kind is opened by name and read in a fixed order; what is missing or broken is said in words."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.corpora import write_texts
from trainer.data import files, hub
from trainer.data.errors import SourceFailed
from trainer.data.hub import HubName, HubSource
from trainer.data.sources import FlawedText, IndexedSource, Source, StreamingSource, open_source
from trainer.errors import ConfigurationError

TEXTS = ["first\n", "second: Grüße 🙂\n", "", "third\r\n"]


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def texts_of(source: Source) -> list[str]:
    if isinstance(source, IndexedSource):
        return [source.read(i) for i in range(len(source))]
    return list(source.documents(0))


def rows(texts: list[str], column: str = "text") -> list[dict[str, Any]]:
    return [{"number": i, column: text} for i, text in enumerate(texts)]


def write_table(path: Path, texts: list[str], column: str = "text") -> Path:
    from datasets import Dataset

    path.parent.mkdir(parents=True, exist_ok=True)
    match path.suffix:
        case ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows(texts, column)))
        case ".parquet":
            Dataset.from_list(rows(texts, column)).to_parquet(str(path))
        case ".arrow":
            Dataset.from_list(rows(texts, column)).save_to_disk(str(path.parent))
            (path.parent / "data-00000-of-00001.arrow").rename(path)
    return path


# python_docs


def test_the_standard_library_is_tens_of_documents_per_kind_without_installed_packages() -> None:
    source = open_source("python_docs")
    assert isinstance(source, IndexedSource)
    assert len(source) > 300
    root = Path(sysconfig.get_paths()["stdlib"])
    found = files.find_files(root, (".py", ".txt"), without=("site-packages", "dist-packages", "__pycache__"))
    names = [file.relative for file in found]
    assert names == sorted(names)
    assert "argparse.py" in names
    assert not any("site-packages" in name or "__pycache__" in name for name in names)
    assert sum(len(source.read(i)) for i in range(0, len(source), 50)) > 100_000


def test_the_standard_library_is_read_in_the_same_order_every_time() -> None:
    first, second = open_source("python_docs"), open_source("python_docs")
    assert isinstance(first, IndexedSource)
    assert isinstance(second, IndexedSource)
    assert first.fingerprint == second.fingerprint
    assert [first.read(i) for i in range(0, 200, 20)] == [second.read(i) for i in range(0, 200, 20)]


def test_opening_files_loads_no_library_of_tables_or_tensors() -> None:
    code = (
        "import sys; from trainer.data.sources import open_source; open_source('python_docs');"
        "print([m for m in ('torch', 'datasets', 'numpy', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


# text


def test_text_is_a_document_per_file_in_the_order_of_names(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "books", TEXTS)
    (folder / "deep").mkdir()
    (folder / "deep" / "last.TXT").write_text("last")
    (folder / "not.md").write_text("no")
    assert texts_of(open_source("text", str(folder))) == [*TEXTS, "last"]
    assert texts_of(open_source("text", str(folder / "0001.txt"))) == TEXTS[1:2]
    assert texts_of(open_source("text", str(folder / "000[13].txt"))) == [TEXTS[1], TEXTS[3]]
    assert texts_of(open_source("text", str(folder / "**" / "*.md"))) == ["no"]


def test_broken_utf_8_is_replaced_and_a_byte_order_mark_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa\xffb\xc3")
    assert texts_of(open_source("text", str(tmp_path))) == ["a\ufffdb\ufffd"]


@pytest.mark.parametrize("line", ["short line\n", "€" * 70 + "\n", "€" * 1_000])
@pytest.mark.parametrize("copies", [1, 2, 3, 10, 31])
def test_a_large_file_is_cut_at_line_ends_and_nothing_of_it_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, copies: int
) -> None:
    monkeypatch.setattr(files, "LONGEST_DOCUMENT", 100)
    monkeypatch.setattr(files, "_LONGEST_LINE", 64)
    text = line * copies
    (tmp_path / "large.txt").write_text(text)
    parts = texts_of(open_source("text", str(tmp_path)))
    assert "".join(parts) == text
    assert max(len(part.encode()) for part in parts) <= 100 + 64
    if line.startswith("short"):
        assert all(part.endswith("\n") for part in parts if part)


def test_a_copy_of_the_data_elsewhere_has_the_same_fingerprint_and_a_change_another(tmp_path: Path) -> None:
    one, two = write_texts(tmp_path / "one", TEXTS), write_texts(tmp_path / "two", TEXTS)
    before = open_source("text", str(one)).fingerprint
    assert open_source("text", str(two)).fingerprint == before
    (two / "more.txt").write_text("more")
    assert open_source("text", str(two)).fingerprint != before


def test_a_file_that_vanishes_is_named(tmp_path: Path) -> None:
    source = open_source("text", str(write_texts(tmp_path, TEXTS)))
    assert isinstance(source, IndexedSource)
    (tmp_path / "0001.txt").unlink()
    with pytest.raises(SourceFailed, match=r"0001\.txt cannot be read"):
        source.read(1)


# tables


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_tables_are_a_document_per_row_in_the_order_of_files_and_rows(tmp_path: Path, kind: str) -> None:
    write_table(tmp_path / "b" / f"x.{kind}", ["b0", "b1"])
    write_table(tmp_path / "a" / f"x.{kind}", TEXTS)
    source = open_source(kind, str(tmp_path))
    assert isinstance(source, IndexedSource)
    assert texts_of(source) == [*TEXTS, "b0", "b1"]


def test_another_column_holds_the_text(tmp_path: Path) -> None:
    file = write_table(tmp_path / "x.jsonl", TEXTS, column="content")
    assert texts_of(open_source("jsonl", str(file), "content")) == TEXTS
    with pytest.raises(ConfigurationError, match=r'no column "text".*it has number, content'):
        open_source("jsonl", str(file))
    with pytest.raises(ConfigurationError, match='"number" holds int64, not text'):
        open_source("jsonl", str(file), "number")


def test_a_row_without_text_is_an_empty_document(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n{"text": null}\n{"other": 1}\n')
    assert texts_of(open_source("jsonl", str(tmp_path))) == ["a", "", ""]


def test_empty_documents_are_bad_and_named_with_their_place(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("")
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n{"text": null}\n')
    streamed = open_source("any/name", str(write_table(tmp_path / "hub" / "x.jsonl", ["a", ""]).parent))
    assert isinstance(streamed, StreamingSource)
    texts = open_source("text", str(tmp_path)), open_source("jsonl", str(tmp_path / "x.jsonl"))
    found = [source.read(1) for source in texts if isinstance(source, IndexedSource)]
    found.append(list(streamed.documents(0))[1])
    assert found == ["", "", ""]
    flaws = [each.flaw for each in found if isinstance(each, FlawedText)]
    assert flaws == [f"{tmp_path}/b.txt: empty", "row 1: empty", "document 1: empty"]


def test_broken_utf_8_in_a_table_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "a\xffb"}\n{"text": "c"}\n')
    assert texts_of(open_source("jsonl", str(tmp_path))) == ["a\ufffdb", "c"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.jsonl", b'{"text": b}\n', r"x\.jsonl, byte 0: "),
        ("x.jsonl.gz", gzip.compress(b'{"text": b}\n', mtime=0), r"x\.jsonl\.gz, line 1: "),
        ("x.parquet", b"PAR1 no more", r"x\.parquet, "),
        ("x.arrow", b"ARROW1 no more", r"x\.arrow, "),
    ],
)
def test_a_table_of_which_nothing_can_be_read_is_named_with_the_cause(
    tmp_path: Path, name: str, content: bytes, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigurationError, match=words) as error:
        open_source(name.split(".")[1], str(tmp_path))
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "texts", "flaws"),
    [
        ("x.jsonl", b'{"text": "a"}\n{"text": b}\n{"text": "c"}', ["a", "", "c"], ["byte 14: broken line"]),
        (
            "x.jsonl",
            b'{"text": "\xff"}\n{"text": "\\ud800"}\n',
            ["\ufffd", "\ufffd"],
            ["byte 0: broken UTF-8", "byte 14: broken UTF-8"],
        ),
        ("x.jsonl", b'{"text": "\xff"}\n{"text": ', ["\ufffd", ""], ["broken UTF-8", "broken line"]),
        (
            "x.jsonl.gz",
            gzip.compress(b'{"text": "a"}\n{"text": b}\n', mtime=0),
            ["a", ""],
            ["line 2: broken line"],
        ),
    ],
)
def test_what_can_be_read_of_a_damaged_table_is_read_and_the_rest_is_named_with_its_place(
    tmp_path: Path, name: str, content: bytes, texts: list[str], flaws: list[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    source = open_source("jsonl", str(tmp_path))
    assert isinstance(source, IndexedSource)
    found = [source.read(index) for index in range(len(source))]
    assert found == texts
    said = [each.flaw for each in found if isinstance(each, FlawedText)]
    assert all(str(tmp_path / name) in each for each in said)
    assert all(flaw in each for flaw, each in zip(flaws, said, strict=True))


def test_an_unreadable_row_group_is_one_bad_document_and_the_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    rows = pa.table({"text": [f"text {i} " * 20 for i in range(40)]})
    pq.write_table(rows, path, row_group_size=10, compression="none", use_dictionary=False)
    content = bytearray(path.read_bytes())
    page = pq.read_metadata(path).row_group(1).column(0).data_page_offset
    content[page : page + 40] = b"\xff" * 40
    path.write_bytes(content)
    source = open_source("parquet", str(tmp_path))
    assert isinstance(source, IndexedSource)
    found = [source.read(index) for index in range(len(source))]
    assert [each for each in found if each] == [rows["text"][i].as_py() for i in [*range(10), *range(20, 40)]]
    (flaw,) = [each.flaw for each in found if isinstance(each, FlawedText)]
    assert f"{path}, row group 1: unreadable" in flaw


def test_a_stream_ends_at_once_at_a_broken_line_which_would_be_broken_again(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n{"text": b}\n')
    source = open_source("any/name", str(tmp_path))
    assert isinstance(source, StreamingSource)
    with pytest.raises(SourceFailed, match=f"{tmp_path}.* is broken.*JSON"):
        list(source.documents(0))


def test_reading_tables_draws_no_progress_bars(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    open_source("jsonl", str(write_table(tmp_path / "x.jsonl", TEXTS)))
    assert capfd.readouterr() == ("", "")


# What is missing


@pytest.mark.parametrize(
    ("dataset", "path", "words"),
    [
        ("text", None, "needs a dataset_path"),
        ("jsonl", None, "needs a dataset_path"),
        ("text", "nowhere", r"dataset_path .*nowhere: no such file or folder"),
        ("text", "no*.where", r"dataset_path .*no\*\.where: no file matches"),
        ("text", "empty_folder", r"empty_folder: the folder holds no file that ends in \.txt"),
        ("parquet", "texts", r"texts: the folder holds no file that ends in \.parquet"),
        ("text", "empty_files", r"empty_files: all 2 files are empty"),
        ("jsonl", "empty.jsonl", r"empty\.jsonl: the file is empty"),
        ("python_doc", None, 'did you mean "python_docs"'),
        ("json", None, 'did you mean "jsonl"'),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, dataset: str, path: str | None, words: str) -> None:
    write_texts(tmp_path / "texts", TEXTS)
    write_texts(tmp_path / "empty_files", ["", ""])
    (tmp_path / "empty_folder").mkdir()
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ConfigurationError, match=words):
        open_source(dataset, str(tmp_path / path) if path else None)


# hub


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("owner/name", HubName("owner/name", None, "train")),
        ("owner/name:small", HubName("owner/name", "small", "train")),
        ("owner/name@validation", HubName("owner/name", None, "validation")),
        ("owner/name:small@test", HubName("owner/name", "small", "test")),
        ("c4", HubName("allenai/c4", "en", "train")),
    ],
)
def test_hub_names_say_configuration_and_split(name: str, expected: HubName) -> None:
    assert HubName.parse(name) == expected


def test_a_local_folder_in_a_layout_of_the_hub_is_streamed(tmp_path: Path) -> None:
    write_table(tmp_path / "data" / "train-0.jsonl", TEXTS)
    write_table(tmp_path / "data" / "validation-0.jsonl", ["held out"])
    source = open_source("owner/name", str(tmp_path))
    assert isinstance(source, StreamingSource)
    assert texts_of(source) == TEXTS
    assert list(source.documents(1)) == TEXTS[1:]
    assert list(source.documents(9)) == []
    assert texts_of(open_source("owner/name@validation", str(tmp_path))) == ["held out"]


@pytest.mark.parametrize(
    ("dataset", "column", "words"),
    [
        ("owner/name@nowhere", "text", "Bad split: nowhere"),
        ("owner/name:nothing", "text", "'nothing' not found"),
        ("owner/name", "content", 'no column "content"'),
        ("owner/name", "number", '"number".* holds int'),
    ],
)
def test_a_wrong_split_configuration_or_column_is_refused(
    tmp_path: Path, dataset: str, column: str, words: str
) -> None:
    write_table(tmp_path / "train.jsonl", TEXTS)
    with pytest.raises(ConfigurationError, match=words):
        texts_of(open_source(dataset, str(tmp_path), column))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionError("Couldn't reach the Hub"), "could not be opened: ConnectionError: Couldn't reach"),
        ("DatasetNotFoundError", "no such data set"),
    ],
)
def test_a_hub_or_data_set_that_is_not_found_is_named(
    monkeypatch: pytest.MonkeyPatch, error: Exception | str, words: str
) -> None:
    import datasets

    def fail(*args: object, **kwargs: object) -> None:
        raise getattr(datasets.exceptions, error)("x") if isinstance(error, str) else error

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(ConfigurationError, match=words) as raised:
        open_source("owner/name:small")
    assert "owner/name:small@train" in str(raised.value)


class FlakyRows:
    """A data set whose reader breaks before document `at`, `times` times."""

    def __init__(self, texts: list[str], at: int, times: int) -> None:
        from datasets import IterableDataset

        def generate() -> Iterator[dict[str, Any]]:
            for number, text in enumerate(texts):
                if number == at and self.left > 0:
                    self.left -= 1
                    raise TimeoutError("no answer")
                yield {"text": text}

        self.left = times
        self.rows = IterableDataset.from_generator(generate)


def flaky(at: int, times: int, waits: tuple[float, ...]) -> HubSource:
    return HubSource("owner/name", FlakyRows(list("abcdef"), at, times).rows, "text", waits)


def test_a_stream_that_breaks_goes_on_at_the_document_where_it_broke(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert list(flaky(at=3, times=2, waits=(0.0, 0.0)).documents(0)) == list("abcdef")
    assert list(flaky(at=3, times=1, waits=(0.0,)).documents(2)) == list("cdef")
    assert "owner/name: reading document 3 failed (TimeoutError: no answer); attempt 2 of 3" in caplog.text


def test_a_stream_that_stays_away_ends_after_a_bounded_number_of_attempts() -> None:
    """Case D8: a source that fails ends in a collective's timeout."""
    documents = flaky(at=3, times=10**9, waits=(0.0, 0.0)).documents(0)
    assert [next(documents) for _ in range(3)] == list("abc")
    with pytest.raises(
        SourceFailed, match=r"owner/name: document 3 could not be read in 3 attempts.*no answer"
    ):
        next(documents)


def test_the_waits_between_attempts_end_before_the_default_limit_without_progress() -> None:
    assert list(hub.RETRY_WAITS) == sorted(hub.RETRY_WAITS)
    assert sum(hub.RETRY_WAITS) < 60


def test_a_row_that_is_not_text_is_refused_at_once_without_another_attempt() -> None:
    from datasets import IterableDataset

    def check(row: dict[str, Any], words: str) -> None:
        rows = IterableDataset.from_generator(lambda: iter([row]))
        with pytest.raises(ConfigurationError, match=words):
            list(HubSource("owner/name", rows, "text", waits=(60.0,)).documents(0))

    check({"text": 3}, "document 0 holds int, not text")
    check({"content": "a"}, 'document 0 has no column "text".*it has content')
