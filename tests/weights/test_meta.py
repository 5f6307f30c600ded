"""Llama as Meta published it: a matrix divided over files comes together, and nothing but tensors is unpickled."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from models.llama.sizes import LlamaSizes
from tests.weights.made import model_of
from tests.weights.test_conversion import weights_in
from trainer.commands.main import main
from trainer.errors import ConfigurationError
from trainer.weights.meta import open_meta
from trainer.weights.source import SourceReader

SIZES = LlamaSizes(
    dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_hidden=48, vocab_size=64, max_seq_len=4096
)
DIVIDED = {"wq": 0, "wk": 0, "wv": 0, "wo": 1, "w1": 0, "w2": 1, "w3": 0, "output": 0}


def meta_folder(path: Path, files: int = 2, embedding: int = 0, **params: Any) -> dict[str, torch.Tensor]:
    """Write such a folder, the embedding divided along a dimension; returns the whole tensors."""
    path.mkdir()
    tensors = dict(model_of(SIZES).state_dict())
    along = {**DIVIDED, "tok_embeddings": embedding}
    for number in range(files):
        parts = {"rope.freqs": torch.zeros(4)}
        for name, tensor in tensors.items():
            dimension = along.get(name.split(".")[-2])
            parts[name] = (tensor if dimension is None else tensor.chunk(files, dimension)[number]).clone()
        torch.save(parts, path / f"consolidated.{number:02}.pth")
    described = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": -1, "norm_eps": 1e-5}
    (path / "params.json").write_text(json.dumps({**described, **params}))
    return tensors


@pytest.mark.parametrize(("files", "embedding"), [(1, 0), (2, 0), (2, 1)])
def test_weights_divided_over_files_come_together(tmp_path: Path, files: int, embedding: int) -> None:
    """Llama 2 divides the embedding's features, Llama 3 its vocabulary."""
    expected = meta_folder(tmp_path / "meta", files, embedding)
    assert main(["import-meta", str(tmp_path / "meta"), str(tmp_path / "run")]) == 0
    assert open_meta(tmp_path / "meta").sizes == SIZES
    loaded = weights_in(tmp_path / "run")
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_a_part_that_lies_in_several_files_is_read_from_all_of_them(tmp_path: Path) -> None:
    expected = meta_folder(tmp_path / "meta")
    source = open_meta(tmp_path / "meta").source
    name = "layers.1.feed_forward.w2.weight"
    assert torch.equal(source.read(name, (3, 10), (5, 30)), expected[name][3:8, 10:40])


def test_what_the_files_do_not_say_is_that_of_the_published_model(tmp_path: Path) -> None:
    meta_folder(tmp_path / "meta", use_scaled_rope=True, rope_theta=500000.0)
    sizes = open_meta(tmp_path / "meta").sizes
    assert sizes.rope_scaling is not None
    assert (sizes.rope_scaling.factor, sizes.max_seq_len, sizes.rope_theta) == (8.0, 131072, 500000.0)


class Hostile:
    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)

    def __init__(self, path: Path) -> None:
        self.path = path


def test_nothing_that_a_file_contains_is_run(tmp_path: Path) -> None:
    meta_folder(tmp_path / "meta", files=1)
    torch.save({"x": Hostile(tmp_path / "made")}, tmp_path / "meta" / "consolidated.00.pth")
    with pytest.raises(ConfigurationError, match="cannot be read as tensors alone") as caught:
        open_meta(tmp_path / "meta")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "made").exists()


def test_folders_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "meta"
    meta_folder(folder)
    (folder / "consolidated.00.pth").rename(folder / "consolidated.02.pth")
    with pytest.raises(ConfigurationError, match="without gaps"):
        open_meta(folder)
    (folder / "consolidated.02.pth").rename(folder / "consolidated.00.pth")
    torch.save({"norm.weight": torch.zeros(32)}, folder / "consolidated.01.pth")
    with pytest.raises(ConfigurationError, match="holds other tensors"):
        open_meta(folder)
    (folder / "params.json").unlink()
    with pytest.raises(ConfigurationError, match=r"holds no params\.json"):
        open_meta(folder)


def test_the_reader_of_a_sharded_source_names_what_does_not_fit(tmp_path: Path) -> None:
    meta_folder(tmp_path / "meta")
    reader = SourceReader(open_meta(tmp_path / "meta").source, tmp_path / "meta")
    with pytest.raises(ConfigurationError, match=r"norm\.weight has shape \(3,\) here and \(32,\) there"):
        reader.read_into("model", {"norm.weight": torch.zeros(3)})
