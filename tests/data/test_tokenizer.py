"""Tokenizers: every format loads, gives text back, keeps the names of special tokens as text, fails in words."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.corpora import SENTENCES, ListSource, ListStream
from trainer.data.tokenizer import Tokenizer, debug_tokenizer, load_tokenizer, train_sentencepiece
from trainer.data.tokenizer_formats import TiktokenTokenizer
from trainer.data.tokenizer_training import sample
from trainer.errors import ConfigurationError

FORMATS = ("byte", "sentencepiece", "hugging_face", "tiktoken")
TEXTS = (*SENTENCES, "", " ", "a\x00b", "<s> </s> <|begin_of_text|> <|end_of_text|> <0x41>", "\ufffd")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizers(tmp_path_factory.mktemp("tokenizers"))


def make_tokenizers(folder: Path) -> Path:
    train_sentencepiece(SENTENCES * 20, 400, folder / "sentencepiece")
    write_hugging_face(folder / "hugging_face")
    write_tiktoken(folder / "tiktoken" / "tokenizer.model")
    return folder


def write_hugging_face(folder: Path, **config: Any) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>", "<other>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    model.train_from_iterator(SENTENCES * 20, trainer)
    # What some published files ask for, and what would lose tokens here.
    model.enable_truncation(max_length=4)
    model.enable_padding(length=512)
    folder.mkdir(parents=True, exist_ok=True)
    model.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_tiktoken(file: Path, merges: tuple[bytes, ...] = (b"th", b"he", b"the", b" the", b"  ")) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    tokens = [bytes([i]) for i in range(256)] + list(merges)
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    file.write_text("".join(lines))
    return file


def load(folder: Path, name: str) -> Tokenizer:
    return load_tokenizer("byte" if name == "byte" else folder / name)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_as_it_was(folder: Path, name: str, text: str) -> None:
    tokenizer = load(folder, name)
    ids = tokenizer.encode(text, bos=True, eos=True)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back_as_it_was(folder: Path, name: str, text: str) -> None:
    tokenizer = load(folder, name)
    # The mark U+2581 stands for a space inside sentencepiece.
    expected = text.replace("\u2581", " ") if name == "sentencepiece" else text
    assert tokenizer.decode(tokenizer.encode(text, bos=False, eos=False)) == expected


@pytest.mark.parametrize("name", FORMATS)
def test_begin_and_end_are_added_where_asked_for_and_only_there(folder: Path, name: str) -> None:
    tokenizer = load(folder, name)
    plain = tokenizer.encode(SENTENCES[0], bos=False, eos=False)
    assert tokenizer.encode(SENTENCES[0], bos=True, eos=True) == [tokenizer.bos_id, *plain, tokenizer.eos_id]
    assert tokenizer.encode(SENTENCES[0], bos=False, eos=True) == [*plain, tokenizer.eos_id]
    assert tokenizer.bos_id not in plain
    assert tokenizer.bos_id != tokenizer.eos_id


@pytest.mark.parametrize("name", FORMATS)
def test_names_of_special_tokens_in_a_text_are_text(folder: Path, name: str) -> None:
    tokenizer = load(folder, name)
    ids = tokenizer.encode("<s></s><|begin_of_text|><|end_of_text|><|eot_id|>", bos=False, eos=False)
    assert tokenizer.bos_id not in ids
    assert tokenizer.eos_id not in ids


@pytest.mark.parametrize("name", FORMATS)
def test_a_batch_gives_what_single_texts_give(folder: Path, name: str) -> None:
    tokenizer = load(folder, name)
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text, bos=False, eos=False) for text in TEXTS]
    assert tokenizer.encode_batch([]) == []


def test_truncation_and_padding_of_a_tokenizer_json_are_switched_off(folder: Path) -> None:
    tokenizer = load(folder, "hugging_face")
    assert len(tokenizer.encode("one two three four five six seven", bos=False, eos=False)) > 4
    assert len(tokenizer.encode_batch(["a"])[0]) == 1


def test_tokenizer_config_names_begin_and_end(tmp_path: Path) -> None:
    write_hugging_face(tmp_path, bos_token={"content": "<other>", "special": True}, eos_token="<s>")
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (2, 0)


def test_formats_are_told_apart_by_content_not_by_name(folder: Path, tmp_path: Path) -> None:
    for name, kind in {
        "sentencepiece/tokenizer.model": "SentencePieceTokenizer",
        "hugging_face/tokenizer.json": "HuggingFaceTokenizer",
        "tiktoken/tokenizer.model": "TiktokenTokenizer",
    }.items():
        (tmp_path / "tokenizer.model").write_bytes((folder / name).read_bytes())
        assert type(load_tokenizer(tmp_path / "tokenizer.model")).__name__ == kind


def test_a_folder_stands_for_the_tokenizer_in_it(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "original").mkdir()
    (tmp_path / "original" / "tokenizer.model").write_bytes(
        (folder / "tiktoken/tokenizer.model").read_bytes()
    )
    assert load_tokenizer(tmp_path).vocab_size == 256 + 5 + 256


def test_llama_3_special_tokens_lie_where_meta_put_them(tmp_path: Path) -> None:
    merges = tuple(b"x" + i.to_bytes(3, "big") for i in range(128_000 - 256))
    tokenizer = load_tokenizer(write_tiktoken(tmp_path / "tokenizer.model", merges))
    assert tokenizer.vocab_size == 128_256
    assert (tokenizer.bos_id, tokenizer.eos_id) == (128_000, 128_001)
    assert TiktokenTokenizer.SPECIAL[6:10] == (
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|reserved_special_token_4|>",
        "<|eot_id|>",
    )
    assert TiktokenTokenizer.SPECIAL[-1] == "<|reserved_special_token_250|>"


@pytest.mark.parametrize(
    "text", [" " * 900_000, "a" * 900_000, "ab " * 300_000, "\n" * 60_000 + "x" * 60_000]
)
def test_very_long_texts_and_runs_do_not_exhaust_the_tiktoken_library(folder: Path, text: str) -> None:
    tokenizer = load(folder, "tiktoken")
    assert tokenizer.decode(tokenizer.encode(text, bos=False, eos=False)) == text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no known format"),
        (b"hello", "no known format"),
        (b"\x0a\x05not a model", "not a sentencepiece model"),
        (b'{"model": 3}', "not a tokenizer.json"),
        (b"AA== 0\nAQ== one\n", "line 2"),
        (b"AA== 0\nAQ== 5\n", "the ranks are not 0 to 1"),
        (b"AA== 0\nAQ== 1\n", "254 of the 256 single bytes"),
    ],
)
def test_an_unreadable_file_is_refused_with_its_path_and_the_reason(
    tmp_path: Path, content: bytes, words: str
) -> None:
    file = tmp_path / "tokenizer.model"
    file.write_bytes(content)
    with pytest.raises(ConfigurationError, match=words) as error:
        load_tokenizer(file)
    assert str(file) in str(error.value)


def test_a_missing_path_and_a_folder_without_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no such file"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)


def test_training_is_deterministic_and_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first = train_sentencepiece(SENTENCES * 20, 400, tmp_path / "a").read_bytes()
    second = train_sentencepiece(iter(SENTENCES * 20), 400, tmp_path / "b").read_bytes()
    assert first == second
    assert capfd.readouterr() == ("", "")


def test_training_cuts_long_lines_instead_of_dropping_them(tmp_path: Path) -> None:
    file = train_sentencepiece(["abcdefgh" * 20_000], 300, tmp_path, exact_size=False)
    assert len(load_tokenizer(file).encode("abcdefgh", bos=False, eos=False)) == 1


@pytest.mark.parametrize(
    ("texts", "size", "words"),
    [
        ([], 400, "no text"),
        (["", ""], 400, "no text"),
        (["hello"], 5000, "too high"),
        (SENTENCES, 50, "smaller than"),
    ],
)
def test_a_vocabulary_that_cannot_be_trained_is_refused(
    tmp_path: Path, texts: list[str], size: int, words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        train_sentencepiece(texts, size, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_debug_tokenizer_is_trained_once_and_then_kept(tmp_path: Path) -> None:
    source = ListSource(SENTENCES * 20)
    path = debug_tokenizer(tmp_path, 400, source)
    content = path.read_bytes()
    read = len(source.reads)
    assert read > 0
    assert debug_tokenizer(tmp_path, 400, source) == path
    assert (len(source.reads), path.read_bytes()) == (read, content)
    assert [file.name for file in tmp_path.iterdir()] == ["tokenizer.model"]


def test_the_debug_tokenizer_of_a_small_corpus_is_smaller_than_the_model(tmp_path: Path) -> None:
    assert load_tokenizer(debug_tokenizer(tmp_path, 2048, ListSource(["hello"]))).vocab_size < 2048


def test_a_debug_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    debug_tokenizer(tmp_path, 400, ListSource(SENTENCES * 20))
    with pytest.raises(ConfigurationError, match="400 tokens, the model has 300"):
        debug_tokenizer(tmp_path, 300, ListSource(SENTENCES * 20))


def test_a_sample_is_spread_over_the_corpus() -> None:
    source = ListSource([f"{i:04d}" * 25 for i in range(1000)])
    taken = [int(text[:4]) for text in sample(source, 3200)]
    assert len(taken) == 32
    assert all(min(abs(i - t) for t in taken) <= 33 for i in range(1000))


def test_a_sample_of_all_is_all_once() -> None:
    source = ListSource([f"{i:04d}" for i in range(23)])
    assert sorted(sample(source, 10**9)) == source.texts
    assert list(sample(ListStream(["ab", "cd", "ef"]), 5)) == ["ab", "cd", "e"]
