"""A checkpoint of any layout goes on in any other, exactly: parameters, optimizer state, rate, data position."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoint.tiny import Layout, Run, manager, merge
from tests.distributed.ranks import run_ranks
from trainer.checkpoint.storage import CheckpointReader

ONE = Layout()
LAYOUTS = [ONE, Layout(shard=2), Layout(pipeline=2), Layout(pipeline=2, shard=2)]


def train_and_save(rank: int, layout: Layout, folder: Path) -> dict[str, Any]:
    run = Run(layout, rank)
    run.train(3)
    assert manager(folder, layout).save(run.step, run.state) is not None
    return run.snapshot()


def load_and_train(rank: int, layout: Layout, folder: Path, steps: int = 0) -> dict[str, Any]:
    run = Run(layout, rank)
    run.train(1)  # all of this is to be replaced
    run.step = manager(folder, layout).load(run.state)
    assert run.step == 3
    run.train(steps)
    return run.snapshot()


def train(rank: int, layout: Layout, steps: int) -> dict[str, Any]:
    run = Run(layout, rank)
    run.train(steps)
    return run.snapshot()


def on(layout: Layout, function: Any, *args: Any) -> dict[str, Any]:
    return merge(run_ranks(function, layout.pipeline * layout.shard, layout, *args))


@pytest.mark.parametrize("saved_as", LAYOUTS, ids=lambda layout: layout.text)
def test_every_layout_loads_what_another_saved(tmp_path: Path, saved_as: Layout) -> None:
    saved = on(saved_as, train_and_save, tmp_path)
    assert len(saved["model"]) == 10
    assert len(saved["optimizer"]) == 30
    for loaded_as in LAYOUTS:
        np.testing.assert_equal(on(loaded_as, load_and_train, tmp_path), saved)


def test_a_resumed_run_is_that_which_was_never_interrupted(tmp_path: Path) -> None:
    layout = Layout(pipeline=2, shard=2)
    on(layout, train_and_save, tmp_path)
    straight = on(layout, train, 7)
    np.testing.assert_equal(on(layout, load_and_train, tmp_path, 4), straight)
    # The update rounds differently where shards begin and end elsewhere in the vector registers.
    elsewhere = on(ONE, load_and_train, tmp_path, 4)
    for section in ("model", "optimizer"):
        for name, value in straight[section].items():
            np.testing.assert_allclose(elsewhere[section][name], value, rtol=1e-5, atol=1e-6)


def draw(_rank: int) -> list[float]:
    return [random.random(), float(np.random.rand()), float(np.random.randn()), float(torch.rand(()))]


def save_then_draw(rank: int, layout: Layout, folder: Path) -> list[float]:
    random.seed(rank), np.random.seed(rank), torch.manual_seed(rank)
    random.gauss(0, 1), np.random.randn()  # both keep a second number for the next call
    train_and_save(rank, layout, folder)
    return draw(rank)


def load_then_draw(rank: int, layout: Layout, folder: Path) -> list[float]:
    run = Run(layout, rank)
    random.seed(7), np.random.seed(7), torch.manual_seed(7)
    manager(folder, layout).load(run.state)
    return draw(rank)


def test_random_generators_go_on_on_each_rank_of_the_same_layout_only(tmp_path: Path) -> None:
    layout = Layout(shard=2)
    drawn = run_ranks(save_then_draw, 2, layout, tmp_path)
    assert drawn[0] != drawn[1]
    assert run_ranks(load_then_draw, 2, layout, tmp_path) == drawn
    other = run_ranks(load_then_draw, 2, Layout(pipeline=2), tmp_path)
    assert other[0] == other[1]
    assert other[0] not in drawn


def export(rank: int, layout: Layout, folder: Path) -> dict[str, Any]:
    run = Run(layout, rank)
    run.train(3)
    manager(folder, layout, model_weights_only=True, export_dtype="bfloat16").save(3, run.state, last=True)
    return run.snapshot()


def test_weights_exported_by_four_ranks_are_read_without_a_process_group(tmp_path: Path) -> None:
    trained = on(Layout(pipeline=2, shard=2), export, tmp_path)["model"]
    weights = {name: torch.empty(value.shape) for name, value in trained.items()}
    CheckpointReader(tmp_path / "step-3").read_into("model", weights)
    for name, value in trained.items():
        assert torch.equal(weights[name], torch.from_numpy(value).bfloat16().float())
