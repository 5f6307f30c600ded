"""Only the folders that are checkpoints are counted, replaced or removed (cases C1, C5)."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.checkpoint.folders import STEP_NAME, apply_retention, list_checkpoints
from trainer.checkpoint.local import LocalRoot
from trainer.checkpoint.manifest import MANIFEST_NAME, Contents, Manifest, describe_files, write_manifest

FOREIGN = (
    "foo-step-100",
    "step-1x",
    "step-01",
    "step--1",
    "step-",
    "step-3-old",
    "Step-3",
    "step-3.bak",
    "tb",
)


def save(root: Path, step: int, text: str = "weights", contents: Contents = Contents.FULL) -> Path:
    LocalRoot(root).begin(f"step-{step}")
    partial = LocalRoot(root).writing(f"step-{step}").path
    (partial / "data").write_text(text)
    write_manifest(partial, Manifest(step, contents, "", 1, describe_files(partial, ["data"])))
    return LocalRoot(root).publish(f"step-{step}").path


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def test_checkpoints_are_listed_latest_first_by_number_with_what_is_wrong_with_them(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        save(tmp_path, step)
    (tmp_path / "step-10" / "data").write_text("short")
    listed = list_checkpoints(LocalRoot(tmp_path))
    assert [found.step for found in listed] == [100, 10, 9]
    assert [found.manifest is None for found in listed] == [False, True, False]
    assert listed[1].problem == "data has 5 bytes instead of 7"


def test_a_folder_renamed_by_hand_to_another_step_is_not_valid(tmp_path: Path) -> None:
    save(tmp_path, 3).rename(tmp_path / "step-5")
    assert list_checkpoints(LocalRoot(tmp_path))[0].problem == "its manifest is of step 3"


def test_no_folder_means_no_checkpoints(tmp_path: Path) -> None:
    assert list_checkpoints(LocalRoot(tmp_path / "none")) == []
    assert LocalRoot(tmp_path / "none").clean_up(STEP_NAME) == []


def test_retention_keeps_the_latest_k(tmp_path: Path) -> None:
    for step in (2, 9, 10, 11):
        save(tmp_path, step)
    assert apply_retention(LocalRoot(tmp_path), 2, 11) == [9, 2]
    assert names(tmp_path) == {"step-10", "step-11"}


def test_retention_of_0_keeps_all(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert apply_retention(LocalRoot(tmp_path), 0, 3) == []


def test_retention_touches_only_its_own_folders(tmp_path: Path) -> None:
    """Case C5: it removes folders such as foo-step-100."""
    for name in FOREIGN:
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "step-7").write_text("a file, not a folder")
    elsewhere = save(tmp_path / "elsewhere", 1)
    (tmp_path / "step-1").symlink_to(elsewhere)
    for step in (2, 3):
        save(tmp_path, step)
    assert apply_retention(LocalRoot(tmp_path), 1, 3) == [2]
    assert LocalRoot(tmp_path).clean_up(STEP_NAME) == []
    assert names(tmp_path) == {*FOREIGN, "step-7", "elsewhere", "step-1", "step-3"}
    assert (elsewhere / MANIFEST_NAME).exists()


def test_retention_never_counts_an_invalid_or_unfinished_checkpoint(tmp_path: Path) -> None:
    """Case C1."""
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "step-3" / MANIFEST_NAME).unlink()
    LocalRoot(tmp_path).begin("step-4")
    assert apply_retention(LocalRoot(tmp_path), 1, 4) == [1]
    assert names(tmp_path) == {"step-2", "step-3", "step-4.partial"}


def test_retention_leaves_exported_weights_and_steps_of_an_earlier_continuation_alone(tmp_path: Path) -> None:
    save(tmp_path, 1, contents=Contents.WEIGHTS)
    for step in (2, 3, 50):
        save(tmp_path, step)
    assert apply_retention(LocalRoot(tmp_path), 1, 3) == [2]
    assert names(tmp_path) == {"step-1", "step-3", "step-50"}


def test_what_a_crash_left_is_removed_at_the_next_start(tmp_path: Path) -> None:
    save(tmp_path, 1)
    LocalRoot(tmp_path).begin("step-2")
    save(tmp_path, 3).rename(tmp_path / "step-3.removing")
    assert LocalRoot(tmp_path).clean_up(STEP_NAME) == ["step-2.partial", "step-3.removing"]
    assert names(tmp_path) == {"step-1"}


def test_a_step_saved_again_replaces_the_former_one(tmp_path: Path) -> None:
    save(tmp_path, 1, "former")
    save(tmp_path, 1, "new")
    assert names(tmp_path) == {"step-1"}
    assert (tmp_path / "step-1" / "data").read_text() == "new"


def test_a_crash_while_a_step_is_replaced_loses_neither(tmp_path: Path) -> None:
    # Between the two renames: the former one is put back.
    save(tmp_path, 1, "former").rename(tmp_path / "step-1.replaced")
    assert LocalRoot(tmp_path).clean_up(STEP_NAME) == ["step-1.replaced"]
    assert (tmp_path / "step-1" / "data").read_text() == "former"
    # After the second rename: the new one stays.
    (tmp_path / "step-1").rename(tmp_path / "step-1.replaced")
    save(tmp_path, 1, "new")
    (tmp_path / "step-1.replaced").mkdir(exist_ok=True)
    assert LocalRoot(tmp_path).clean_up(STEP_NAME) == ["step-1.replaced"]
    assert (tmp_path / "step-1" / "data").read_text() == "new"


@pytest.mark.parametrize("left", ["file", "folder"])
def test_what_was_left_of_the_same_step_is_cleared_before_writing(tmp_path: Path, left: str) -> None:
    LocalRoot(tmp_path).begin("step-5")
    stale = LocalRoot(tmp_path).writing("step-5").path / "stale"
    if left == "file":
        stale.write_text("x")
    else:
        stale.mkdir()
    LocalRoot(tmp_path).begin("step-5")
    assert list(LocalRoot(tmp_path).writing("step-5").path.iterdir()) == []
