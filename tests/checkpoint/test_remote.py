"""Checkpoints where nothing can be renamed: in memory, and in a store of objects that several processes see."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from tests.checkpoint.objects import url
from tests.checkpoint.tiny import Layout, Run, manager
from tests.distributed.ranks import run_ranks
from trainer.checkpoint.filesystem import Root, open_root
from trainer.checkpoint.folders import STEP_NAME, list_checkpoints
from trainer.checkpoint.local import LocalRoot
from trainer.checkpoint.manifest import MANIFEST_NAME
from trainer.checkpoint.remote import MARK
from trainer.errors import ConfigurationError


@pytest.fixture(params=["memory", "objects"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Root]:
    where = "memory://bucket/run" if request.param == "memory" else url(tmp_path / "bucket" / "run")
    yield open_root(tmp_path, where)
    fsspec.filesystem("memory").store.clear()
    fsspec.filesystem("memory").pseudo_dirs[:] = [""]


def save(root: Root, steps: int = 3, **changed: Any) -> Run:
    run, checkpoints = Run(Layout(), 0), manager(root, **{"interval": 1, **changed})
    for step in range(1, steps + 1):
        run.train()
        checkpoints.maybe_save(step, run.state)
    checkpoints.complete()
    return run


def load(root: Root, **changed: Any) -> tuple[Run, int | None]:
    run = Run(Layout(), 0)
    return run, manager(root, **changed).load(run.state)


def system(root: Any) -> Any:
    return root.system


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_what_is_saved_is_listed_verified_loaded_and_the_latest_k_are_kept(root: Root, mode: str) -> None:
    saved = save(root, keep_latest_k=2, async_mode=mode)
    assert root.names() == ["step-2", "step-3"]
    assert [found.step for found in list_checkpoints(root) if found.manifest] == [3, 2]
    loaded, step = load(root)
    assert step == 3
    np.testing.assert_equal(loaded.snapshot(), saved.snapshot())


@pytest.mark.parametrize("verify", ["full", "sizes"])
def test_a_damaged_one_is_passed_over(root: Any, verify: str, caplog: pytest.LogCaptureFixture) -> None:
    save(root)
    path = f"{root.path}/step-3/__0_0.distcp"
    content = bytearray(system(root).cat_file(path))
    content[len(content) // 2] ^= 1
    system(root).pipe_file(path, bytes(content) if verify == "full" else bytes(content[:-1]))
    assert load(root, verify=verify)[1] == 2
    assert f"{root}/step-3 is not valid" in caplog.text


def test_what_is_half_written_or_half_removed_is_cleaned_up_and_the_others_stay(
    root: Any, caplog: pytest.LogCaptureFixture
) -> None:
    save(root)
    # Ended before the manifest was written, and in the middle of removing.
    system(root).rm_file(f"{root.path}/step-3/{MANIFEST_NAME}")
    system(root).pipe_file(f"{root.path}/step-3/{MARK}", b"")
    # Ended when the manifest had been written, before anybody said so.
    system(root).pipe_file(f"{root.path}/step-2/{MARK}", b"")
    assert load(root)[1] == 2
    assert root.names() == ["step-1", "step-2"]
    assert MARK not in root.folder("step-2").sizes()
    assert f"{root}/step-3: left by a save that did not finish" in caplog.text


def test_a_folder_that_is_not_ours_is_left_alone(root: Any) -> None:
    """Case C5, and checkpoints that another trainer wrote without a manifest."""
    save(root, 2)
    for name in ("foo-step-100", "step-01", "step-9"):
        system(root).makedirs(f"{root.path}/{name}", exist_ok=True)
        system(root).pipe_file(f"{root.path}/{name}/.metadata", b"theirs")
    save(root, 3, keep_latest_k=1)
    assert load(root)[1] == 3
    assert root.names() == ["foo-step-100", "step-01", "step-3", "step-9"]


def test_a_save_that_fails_leaves_nothing_and_the_one_before(
    root: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, checkpoints = Run(Layout(), 0), manager(root, keep_latest_k=1)
    run.train()
    assert checkpoints.save(1, run.state) is not None

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(root.folder("x")), "create", full)
    run.train()
    assert checkpoints.save(2, run.state) is None
    monkeypatch.undo()
    assert root.names() == ["step-1"]
    assert load(root)[1] == 1


def test_a_step_saved_again_takes_the_place_of_the_former(root: Root) -> None:
    save(root, 2)
    run = Run(Layout(), 0)
    run.train(5)
    assert manager(root).save(2, run.state) is not None
    loaded, step = load(root)
    assert step == 2
    np.testing.assert_equal(loaded.snapshot(), run.snapshot())


def save_on(rank: int, layout: Layout, folder: Path) -> dict[str, Any]:
    run = Run(layout, rank)
    run.train(3)
    checkpoints = manager(open_root(folder, url(folder / "bucket")), layout, async_mode="async", interval=1)
    checkpoints.maybe_save(3, run.state)
    checkpoints.complete()
    return run.snapshot()


def load_on(rank: int, layout: Layout, folder: Path) -> dict[str, Any]:
    run = Run(layout, rank)
    assert manager(open_root(folder, url(folder / "bucket")), layout).load(run.state) == 3
    return run.snapshot()


def test_several_ranks_write_and_read_one_store(tmp_path: Path) -> None:
    saved = run_ranks(save_on, 2, Layout(shard=2), tmp_path)
    np.testing.assert_equal(run_ranks(load_on, 2, Layout(shard=2), tmp_path), saved)
    loaded = run_ranks(load_on, 2, Layout(pipeline=2), tmp_path)
    whole = {**loaded[0]["model"], **loaded[1]["model"]}
    np.testing.assert_equal(whole, saved[0]["model"])


def test_a_file_url_is_a_path_of_this_machine_with_its_renames(tmp_path: Path) -> None:
    assert open_root(Path("run"), f"file://{tmp_path}/x") == LocalRoot(tmp_path / "x")
    assert open_root(Path("run"), "checkpoint") == LocalRoot(Path("run/checkpoint"))


@pytest.mark.parametrize("where", ["nowhere://bucket/run", "abfs://container/run"])
def test_a_url_that_nobody_here_can_open_is_refused(where: str) -> None:
    with pytest.raises(ConfigurationError, match=r"Protocol not known|[Ii]nstall"):
        open_root(Path(), where)


def test_leftovers_of_no_folder_are_none(root: Root) -> None:
    assert root.clean_up(STEP_NAME) == []
    assert list_checkpoints(root) == []
