"""`stageline prepare`: makes a tokenizer of any corpus; what is wrong ends with exit code 2 and a reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.data.corpora import SENTENCES, write_texts
from trainer.commands.prepare import run
from trainer.data.tokenizer import load_tokenizer


def test_a_tokenizer_of_text_files_is_written_and_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = write_texts(tmp_path / "corpus", SENTENCES * 5)
    arguments = ["--train-tokenizer", "--vocab-size", "350", "--dataset", "text"]
    arguments += ["--dataset-path", str(corpus), "--output", str(tmp_path / "made" / "here")]
    assert run(arguments) == 0
    tokenizer = load_tokenizer(tmp_path / "made" / "here")
    assert tokenizer.vocab_size == 350
    assert tokenizer.decode(tokenizer.encode(SENTENCES[2], bos=True, eos=True)) == SENTENCES[2]
    assert (
        f"--model.tokenizer_path {tmp_path / 'made' / 'here' / 'tokenizer.model'}" in capsys.readouterr().out
    )


def test_a_tokenizer_of_a_column_of_json_lines(tmp_path: Path) -> None:
    lines = [json.dumps({"content": text}) + "\n" for text in SENTENCES * 5]
    (tmp_path / "x.jsonl").write_text("".join(lines))
    arguments = ["--train-tokenizer", "--vocab-size", "350", "--dataset", "jsonl", "--text-column", "content"]
    assert run([*arguments, "--dataset-path", str(tmp_path), "--output", str(tmp_path)]) == 0


def test_a_tokenizer_of_the_default_corpus(tmp_path: Path) -> None:
    arguments = ["--train-tokenizer", "--vocab-size", "512", "--sample-megabytes", "0.3"]
    assert run([*arguments, "--output", str(tmp_path)]) == 0
    assert load_tokenizer(tmp_path).vocab_size == 512


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--vocab-size", "300", "--output", "o"], "--train-tokenizer"),
        (["--train-tokenizer", "--output", "o"], "--vocab-size"),
        (["--train-tokenizer", "--vocab-size", "300"], "--output"),
        (["--train-tokenizer", "--vocab-size", "many", "--output", "o"], "--vocab-size"),
        (["--train-tokenizer", "--vocab-size", "-3", "--output", "o"], "not between 1 and"),
        (
            ["--train-tokenizer", "--vocab-size", "300", "--output", "o", "--sample-megabytes", "0"],
            "positive",
        ),
    ],
)
def test_wrong_arguments_end_with_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("dataset", "path", "size", "words"),
    [
        ("text", "nowhere", "300", "no such file or folder"),
        ("parquet", "corpus", "300", "no file that ends in .parquet"),
        ("txt", None, "300", 'did you mean "text"'),
        ("text", "corpus", "20", "smaller than"),
        ("text", "corpus", "9000", "too high"),
    ],
)
def test_data_that_cannot_be_used_ends_with_exit_code_2_and_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dataset: str, path: str | None, size: str, words: str
) -> None:
    write_texts(tmp_path / "corpus", SENTENCES)
    arguments = [
        "--train-tokenizer",
        "--vocab-size",
        size,
        "--dataset",
        dataset,
        "--output",
        str(tmp_path / "o"),
    ]
    assert run([*arguments, *(["--dataset-path", str(tmp_path / path)] if path else [])]) == 2
    error = capsys.readouterr().err
    assert error.startswith("stageline prepare: ")
    assert words in error
    assert error.count("\n") == 1


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["--help"])
    assert ended.value.code == 0
    assert "stageline prepare --train-tokenizer --vocab-size" in capsys.readouterr().out
