"""Which checkpoints there are, which of them are valid, and retention."""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainer.checkpoint.filesystem import Folder, Root
from trainer.checkpoint.manifest import Contents, InvalidCheckpoint, Manifest, read_manifest

STEP_NAME = re.compile(r"step-(0|[1-9][0-9]{0,17})")


@dataclass(frozen=True)
class Found:
    """A folder with the name of a checkpoint. `problem` says why it is not valid; then there is no manifest."""

    step: int
    folder: Folder
    manifest: Manifest | None
    problem: str | None = None


def step_name(step: int) -> str:
    """The name of the folder of a step's checkpoint."""
    return f"step-{step}"


def list_checkpoints(root: Root) -> list[Found]:
    """All folders named step-N, latest first, with files and sizes verified; checksums are not."""
    steps = sorted((int(match[1]) for match in map(STEP_NAME.fullmatch, root.names()) if match), reverse=True)
    return [_look_at(root, step) for step in steps]


def apply_retention(root: Root, keep: int, saved_step: int) -> list[int]:
    """Remove all but the `keep` latest valid full checkpoints up to `saved_step`; the steps removed.

    Neither counted nor removed: what is invalid or being written; weights-only checkpoints, which are results
    of a run; and steps after `saved_step`, which an earlier continuation of the run left there.
    """
    if not keep:
        return []
    valid = [
        found
        for found in list_checkpoints(root)
        if found.step <= saved_step and found.manifest and found.manifest.contents is Contents.FULL
    ]
    superfluous = valid[keep:]
    for found in superfluous:
        root.remove(found.folder.name)
    return [found.step for found in superfluous]


def _look_at(root: Root, step: int) -> Found:
    folder = root.folder(step_name(step))
    try:
        manifest = read_manifest(folder)
    except InvalidCheckpoint as error:
        return Found(step, folder, None, str(error))
    if manifest.step != step:
        return Found(step, folder, None, f"its manifest is of step {manifest.step}")
    return Found(step, folder, manifest)
