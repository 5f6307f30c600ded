"""The tokenizer that is exported is that of the run: transformers gives the same ids, whatever the format was."""

from __future__ import annotations

import base64
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from tests.weights.made import SIZES, hugging_face_folder
from trainer.checkpoint.weights import TrainedModel, find_trained_model
from trainer.config.load import config_to_toml
from trainer.data.tokenizer import load_tokenizer, train_sentencepiece
from trainer.weights.hugging_face import open_model
from trainer.weights.importing import from_hugging_face, write_run_folder
from trainer.weights.tokenizer_export import export_tokenizer

pytestmark = pytest.mark.slow  # transformers alone takes seconds to import

TEXTS = [
    "def main():\n    return 1\n",
    "  leading and trailing  \n\n\t",
    "wörld ☃ 你好 😀 a  b   c",
    "don't 12345 <s> </s> x",
    "x" * 70,
    "",
]
CORPUS = [line * 3 for line in (*TEXTS, "the cat sat on the mat and the dog lay by the log ")]


def tiktoken_file(folder: Path) -> Path:
    """Ranks of all bytes, and of merges that follow from each other."""
    merges = [
        b"th",
        b"the",
        b" t",
        b" the",
        b"an",
        b"and",
        b" and",
        b"  ",
        b"    ",
        b"re",
        b"ret",
        b"in",
        b"ma",
    ]
    ranks = [*(bytes([byte]) for byte in range(256)), *merges]
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks)]
    (folder / "tokenizer.model").write_text("".join(lines))
    return folder / "tokenizer.model"


def json_file(folder: Path) -> Path:
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


FORMATS = {
    "byte": lambda folder: "byte",
    "sentencepiece": lambda folder: train_sentencepiece(CORPUS, 300, folder, exact_size=False),
    "tiktoken": tiktoken_file,
    "json": json_file,
}


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("imported")
    hugging_face_folder(folder / "theirs", SIZES["llama"], torch.bfloat16)
    write_run_folder(from_hugging_face(open_model(folder / "theirs")), folder / "run")
    return folder / "run"


def run_with(imported: Path, tokenizer_path: str) -> TrainedModel:
    """The imported run with a tokenizer in its configuration."""
    trained = find_trained_model(imported)
    model = trained.config.model.model_copy(update={"tokenizer_path": tokenizer_path})
    config = trained.config.model_copy(update={"model": model})
    assert f"tokenizer_path = {json.dumps(tokenizer_path)}" in config_to_toml(config)
    return TrainedModel(trained.run_folder, config, trained.step_folder, 0, ())


@pytest.mark.parametrize("form", FORMATS)
def test_transformers_gives_the_ids_of_training(tmp_path: Path, imported: Path, form: str) -> None:
    auto: Any = importlib.import_module("transformers").AutoTokenizer
    (tmp_path / "given").mkdir()
    (tmp_path / "out").mkdir()
    path = str(FORMATS[form](tmp_path / "given"))
    said: list[str] = []
    ids = export_tokenizer(run_with(imported, path), tmp_path / "out", said.append)
    assert not said
    ours, theirs = load_tokenizer(path), auto.from_pretrained(tmp_path / "out")
    assert ids == {"bos_token_id": ours.bos_id, "eos_token_id": ours.eos_id}
    for text in TEXTS:
        plain = theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert plain == ours.encode(text, bos=False, eos=False), text
        assert theirs.decode(plain) == ours.decode(plain)
    if form != "json":  # whose file decides
        assert theirs.encode("the cat") == ours.encode("the cat", bos=True, eos=False)
        assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, ours.eos_id)


def test_a_run_without_a_tokenizer_is_exported_with_a_word_about_it(tmp_path: Path, imported: Path) -> None:
    said: list[str] = []
    assert export_tokenizer(find_trained_model(imported), tmp_path, said.append) == {}
    assert said[0].startswith("no tokenizer is exported")
