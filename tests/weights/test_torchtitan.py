"""Checkpoints of torchtitan: folders as its releases write them, made here with torch alone."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save

from models.registry import family
from tests.distributed.program import run, tiny, values
from tests.weights.made import SIZES, model_of
from tests.weights.test_conversion import weights_in
from trainer.checkpoint.agreement import Ranks
from trainer.checkpoint.restore import restore_weights
from trainer.errors import ConfigurationError
from trainer.weights.torchtitan import is_torchtitan_folder, open_torchtitan

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def torchtitan_folder(folder: Path, weights: dict[str, Tensor], *, flat: bool = True) -> Path:
    """A step folder: flat names with optimizer and more beside them, or as until early 2025 below "model"."""
    state: dict[str, Any] = (
        dict(weights) if flat else {"model": {**weights, "freqs_cis": torch.ones(8, dtype=torch.complex64)}}
    )
    state["optimizer"] = {
        f"state.{name}.exp_avg": torch.zeros_like(tensor) for name, tensor in weights.items()
    }
    state["optimizer"]["param_groups.output.weight.lr"] = 1e-3
    state["lr_scheduler"] = {"last_epoch": 7}
    state["dataloader"] = {"dp_rank_0": b"\x80\x04."}
    state["train_state"] = {"step": torch.tensor(7), "log": io.BytesIO(b"pickled")}
    save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return {
        name: tensor.detach().clone() for name, tensor in model_of(SIZES["llama"], seed=5).named_parameters()
    }


@pytest.mark.parametrize("flat", [True, False])
def test_the_weights_are_those_that_were_saved_whatever_lies_beside_them(
    tmp_path: Path, weights: dict[str, Tensor], flat: bool
) -> None:
    folder = torchtitan_folder(tmp_path / "step-7", weights, flat=flat)
    assert is_torchtitan_folder(folder)
    model = family("llama3").build(SIZES["llama"])
    restore_weights(open_torchtitan(folder), [model], Ranks())
    loaded = dict(model.named_parameters())
    assert loaded.keys() == weights.keys()
    for name, tensor in loaded.items():
        assert torch.equal(tensor, weights[name]), name


def test_another_model_is_refused_with_what_differs(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    fewer = {name: tensor for name, tensor in weights.items() if not name.startswith("layers.0.")}
    folder = torchtitan_folder(tmp_path / "step-7", fewer)
    with pytest.raises(ConfigurationError, match=r"is of another model: layers\.0\.attention"):
        restore_weights(open_torchtitan(folder), [model_of(SIZES["llama"])], Ranks())


def test_a_description_that_would_run_something_is_not_read(
    tmp_path: Path, weights: dict[str, Tensor]
) -> None:
    folder = torchtitan_folder(tmp_path / "step-7", weights)
    (folder / ".metadata").write_bytes(b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.")
    with pytest.raises(ConfigurationError, match=r"posix\.system does not belong into a checkpoint"):
        open_torchtitan(folder)


def test_a_file_that_is_cut_off_is_noticed(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    folder = torchtitan_folder(tmp_path / "step-7", weights)
    path = next(folder.glob("*.distcp"))
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(ConfigurationError, match="more than there is in"):
        open_torchtitan(folder)


@pytest.mark.slow
def test_a_run_starts_from_them(tmp_path: Path) -> None:
    options = "--optimizer.lr 1e-30 --checkpoint.enable_checkpoint"
    run(tiny(tmp_path / "first", options, steps=1))
    folder = torchtitan_folder(tmp_path / "theirs" / "step-7", weights_in(tmp_path / "first"))
    start = f"--training.seed 8 --checkpoint.initial_load_path {folder}"
    said = run(tiny(tmp_path / "second", start, steps=1))
    assert "a checkpoint of torchtitan" in said
    run(tiny(tmp_path / "drawn", "--training.seed 8", steps=1))
    assert values(tmp_path / "second", "loss") != values(tmp_path / "drawn", "loss")
