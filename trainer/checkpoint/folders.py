"""The checkpoint folder: names, publishing, what a crash leaves behind, and retention.

    step-500            a checkpoint; only these are ever counted or removed by retention
    step-500.partial    being written; what a crash leaves of it is removed at the next start
    step-500.replaced   the former step-500 while a new one takes its place
    step-500.removing   no longer wanted, being removed

A checkpoint changes its name before it is removed, so a step-N is never half a checkpoint because of us.
Everything else in the folder belongs to somebody else and is left alone. One process (rank 0) calls these.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from trainer.checkpoint.manifest import Contents, InvalidCheckpoint, Manifest, read_manifest, sync_folder

_STEP = re.compile(r"step-(0|[1-9][0-9]*)")
_LEFTOVER = re.compile(r"step-(0|[1-9][0-9]*)\.(partial|removing)")
_REPLACED = re.compile(r"(step-(?:0|[1-9][0-9]*))\.replaced")


@dataclass(frozen=True)
class Found:
    """A folder with the name of a checkpoint. `problem` says why it is not valid; then there is no manifest."""

    step: int
    path: Path
    manifest: Manifest | None
    problem: str | None = None


def step_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return root / f"step-{step}"


def partial_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of a step is written before it is valid."""
    return root / f"step-{step}.partial"


def list_checkpoints(root: Path) -> list[Found]:
    """All folders named step-N, latest first, with files and sizes verified; checksums are not."""
    if not root.is_dir():
        return []
    steps = sorted(
        (int(match[1]) for match in map(_STEP.fullmatch, _own_folders(root)) if match), reverse=True
    )
    return [_look_at(root, step) for step in steps]


def make_partial(root: Path, step: int) -> None:
    """An empty folder to write the checkpoint of a step into."""
    folder = partial_folder(root, step)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def publish(root: Path, step: int) -> Path:
    """Give a complete partial folder its final name, in place of an earlier checkpoint of the same step."""
    final, replaced = step_folder(root, step), root / f"step-{step}.replaced"
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    partial_folder(root, step).rename(final)
    sync_folder(root)
    # The new one is valid; what cannot be removed now is removed at the next start.
    shutil.rmtree(replaced, ignore_errors=True)
    return final


def remove_leftovers(root: Path) -> list[str]:
    """Remove what interrupted saves and removals left; the names of what was removed or put back."""
    if not root.is_dir():
        return []
    done = []
    for name in _own_folders(root):
        replaced = _REPLACED.fullmatch(name)
        if replaced and not (root / replaced[1]).exists():
            # The save ended between the two renames: the former checkpoint is still the valid one.
            (root / name).rename(root / replaced[1])
            done.append(name)
        elif replaced or _LEFTOVER.fullmatch(name):
            shutil.rmtree(root / name)
            done.append(name)
    return done


def apply_retention(root: Path, keep: int, saved_step: int) -> list[int]:
    """Remove all but the `keep` latest valid full checkpoints up to `saved_step`; the steps removed.

    Neither counted nor removed: what is invalid or being written; weights-only checkpoints, which are results
    of a run; and steps after `saved_step`, which an earlier continuation of the run left there.
    """
    valid = [
        found
        for found in list_checkpoints(root)
        if found.step <= saved_step and found.manifest and found.manifest.contents is Contents.FULL
    ]
    superfluous = valid[keep:] if keep else []
    for found in superfluous:
        removing = root / f"{found.path.name}.removing"
        found.path.rename(removing)
        shutil.rmtree(removing)
    return [found.step for found in superfluous]


def _own_folders(root: Path) -> list[str]:
    """Names of the real folders in root: a link leads to something that is not ours to remove."""
    return sorted(path.name for path in root.iterdir() if path.is_dir() and not path.is_symlink())


def _look_at(root: Path, step: int) -> Found:
    path = step_folder(root, step)
    try:
        manifest = read_manifest(path)
    except InvalidCheckpoint as error:
        return Found(step, path, None, str(error))
    if manifest.step != step:
        return Found(step, path, None, f"its manifest is of step {manifest.step}")
    return Found(step, path, manifest)
