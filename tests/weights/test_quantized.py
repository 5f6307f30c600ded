"""Weights released in float8 with a factor for each block: any part is that part of the whole, multiplied out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.weights.made import SIZES, hugging_face_folder
from trainer.errors import ConfigurationError
from trainer.weights.hugging_face import HuggingFaceModel, open_model

BLOCK = (5, 7)
NAME = "model.layers.1.mlp.experts.3.gate_proj.weight"


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of DeepSeek-V3's form with one matrix (16, 32) in float8 and its factors."""
    folder = tmp_path_factory.mktemp("quantized")
    hugging_face_folder(folder, SIZES["deepseek_v3"], torch.bfloat16)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in list(tensors):
        if ".experts." in name and name.endswith("gate_proj.weight"):
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
            rows, columns = tensors[name].shape
            tensors[f"{name}_scale_inv"] = torch.rand(-(-rows // BLOCK[0]), -(-columns // BLOCK[1])) + 0.5
    save_file(tensors, file)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def opened(quantized: Path) -> HuggingFaceModel:
    return open_model(quantized)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_part_is_multiplied_by_the_factors_of_its_blocks(
    quantized: Path, opened: HuggingFaceModel, data: st.DataObject
) -> None:
    row, column = data.draw(st.integers(0, 15)), data.draw(st.integers(0, 31))
    lengths = data.draw(st.integers(1, 16 - row)), data.draw(st.integers(1, 32 - column))
    tensors = load_file(quantized / "model.safetensors")
    part = opened.source.read("layers.1.moe.experts.w1", (3, row, column), (1, *lengths))[0]
    assert part.dtype == torch.bfloat16
    rows, columns = torch.arange(16) // BLOCK[0], torch.arange(32) // BLOCK[1]
    whole = tensors[NAME].float() * tensors[f"{NAME}_scale_inv"][rows][:, columns]
    assert torch.equal(part, whole.to(torch.bfloat16)[row : row + lengths[0], column : column + lengths[1]])


def test_factors_of_another_shape_are_refused(quantized: Path, tmp_path: Path) -> None:
    tensors = load_file(quantized / "model.safetensors")
    tensors[f"{NAME}_scale_inv"] = torch.ones(4, 4)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((quantized / "config.json").read_text())
    with pytest.raises(ConfigurationError, match=r"has no .*_scale_inv of \(4, 5\) F32 beside it"):
        open_model(tmp_path)
