"""Folders that are not what they should be are refused: one line, with the file and the reason."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.registry import family
from tests.config.reports import report_of
from tests.weights.made import SIZES, hugging_face_folder
from trainer.errors import ConfigurationError
from trainer.weights.hugging_face import open_model

LLAMA = SIZES["llama"]
INDEX = "model.safetensors.index.json"
SECOND = "model-00002-of-00002.safetensors"


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table))


def edit_tensors(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def in_index(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / INDEX, lambda table: change(table["weight_map"]))


def in_config(**changed: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", lambda table: table.update(changed))


def in_second(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder / SECOND, change)


def only_a_pickle(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))


def without_weights(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()


def cut_off(folder: Path) -> None:
    path = folder / SECOND
    path.write_bytes(path.read_bytes()[:-4])


NORM = "model.norm.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"


def placed_in(weight_map: dict[str, Any], file: Any) -> None:
    weight_map[NORM] = file


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (in_index(lambda m: placed_in(m, "../elsewhere.safetensors")), "no safetensors file of the folder"),
        (in_index(lambda m: placed_in(m, "/etc/passwd")), "no safetensors file of the folder"),
        (in_index(lambda m: placed_in(m, "pytorch_model.bin")), "no safetensors file of the folder"),
        (in_index(lambda m: placed_in(m, 7)), "no safetensors file of the folder"),
        (in_index(lambda m: placed_in(m, "model-9.safetensors")), "which is not there"),
        (in_index(lambda m: m.update(more=SECOND)), "lacks more"),
        (in_index(lambda m: m.pop(NORM)), "does not have there"),
        (in_index(lambda m: m.clear()), "lists no tensors"),
        (in_second(lambda t: t.update(more=torch.zeros(1))), "holds more"),
        (cut_off, "was it cut off?"),
        (only_a_pickle, "pytorch_model.bin, a pickle"),
        (without_weights, "neither model.safetensors nor"),
        (lambda folder: (folder / "config.json").unlink(), "holds no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "config.json").write_text("[]"), "is no table"),
        (in_config(model_type="gpt2"), "model_type = 'gpt2'"),
        (in_config(hidden_size=None), "hidden_size is missing"),
        (in_config(hidden_size="32"), "config.json"),
        (in_config(num_attention_heads=5), "head_dim"),
        (in_config(attention_bias=True), "attention_bias = True"),
        (in_config(hidden_act="gelu"), "hidden_act = 'gelu'"),
        (in_config(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "rope_type = 'dynamic'"),
        (in_config(quantization_config={"quant_method": "awq"}), "the method 'awq'"),
        (in_config(intermediate_size=56), "(48, 32) there, (56, 32) is needed"),
        (in_config(num_hidden_layers=3), "model.layers.2.self_attn.q_proj.weight is not in it"),
        (in_config(num_hidden_layers=1), "is in it, not in the model"),
    ],
)
def test_a_damaged_folder_is_refused_in_one_line_that_says_why(
    tmp_path: Path, damage: Callable[[Path], object], reason: str
) -> None:
    hugging_face_folder(tmp_path, LLAMA, files=2)
    open_model(tmp_path)
    damage(tmp_path)
    with pytest.raises(ConfigurationError) as caught:
        open_model(tmp_path)
    assert reason in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.zeros(32, 33), "(32, 33) there"),
        (torch.zeros(32, 32, dtype=torch.int8), "holds I8"),
        (torch.zeros(32, 32).to(torch.float8_e4m3fn), "no quantization_config"),
    ],
)
def test_a_tensor_of_another_kind_is_refused(tmp_path: Path, tensor: torch.Tensor, reason: str) -> None:
    hugging_face_folder(tmp_path, LLAMA)
    edit_tensors(tmp_path / "model.safetensors", lambda tensors: tensors.update({QUERY: tensor}))
    with pytest.raises(ConfigurationError, match="of another model") as caught:
        open_model(tmp_path)
    assert reason in str(caught.value)


def test_what_old_files_hold_beside_the_weights_is_left_out(tmp_path: Path) -> None:
    hugging_face_folder(tmp_path, LLAMA)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(tmp_path / "model.safetensors", lambda tensors: tensors.update({name: torch.zeros(4)}))
    assert name not in open_model(tmp_path).source.forms


def test_a_tied_output_in_the_files_must_be_the_embedding(tmp_path: Path) -> None:
    hugging_face_folder(tmp_path, SIZES["llama tied"])
    file = tmp_path / "model.safetensors"
    embedding = "model.embed_tokens.weight"
    edit_tensors(file, lambda tensors: tensors.update({"lm_head.weight": tensors[embedding].clone()}))
    open_model(tmp_path)
    edit_tensors(file, lambda tensors: tensors["lm_head.weight"][257, 31].add_(1))
    with pytest.raises(ConfigurationError, match=r"lm_head\.weight is in it, not in the model"):
        open_model(tmp_path)


def test_an_output_of_its_own_starts_as_the_embedding_to_which_theirs_is_tied(tmp_path: Path) -> None:
    model = hugging_face_folder(tmp_path, SIZES["llama tied"])
    source = open_model(tmp_path, replace(SIZES["llama tied"], tie_embeddings=False)).source
    embedding = model.state_dict()["tok_embeddings.weight"]
    for name in ("output.weight", "tok_embeddings.weight"):
        assert torch.equal(source.read(name, (0, 0), embedding.shape), embedding)


def test_a_folder_of_another_family_than_the_configured_is_refused(tmp_path: Path) -> None:
    hugging_face_folder(tmp_path, LLAMA)
    with pytest.raises(ConfigurationError, match=r"model_type = 'llama'; expected qwen3$"):
        open_model(tmp_path, among=[family("qwen3")])
    arguments = ("--checkpoint.initial_load_path", str(tmp_path))
    assert "is of another model: dim = 32 there, 256 here" in report_of(*arguments, world_size=1)
    assert "expected qwen3" in report_of(*arguments, "--model.name", "qwen3", world_size=1)
    more = ("--checkpoint.initial_load_model_only", "false")
    assert "a Hugging Face folder holds weights only" in report_of(*arguments, *more, world_size=1)
