"""A trained model: its run folder found from a path, its checkpoint verified."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainer.checkpoint.filesystem import Folder, Root, open_root
from trainer.checkpoint.folders import STEP_NAME, Found, list_checkpoints
from trainer.checkpoint.local import LocalFolder, LocalRoot
from trainer.checkpoint.manifest import InvalidCheckpoint, checksum_problems, read_manifest
from trainer.config.load import load
from trainer.config.schema import Config
from trainer.errors import ConfigurationError

CONFIG_NAME = "config.toml"


@dataclass(frozen=True)
class TrainedModel:
    """Where a model's weights lie, and the configuration that it was trained with."""

    run_folder: Path
    config: Config
    step_folder: Folder
    step: int
    passed_over: tuple[str, ...]  # a sentence for each later checkpoint that is not valid


def find_trained_model(path: Path) -> TrainedModel:
    """The model that a path means: a run folder or its checkpoint folder (the latest valid one), or one step-N.

    Checksums are verified. Raises ConfigurationError, with the path and the reason, if there is none.
    """
    if not path.is_dir():
        raise ConfigurationError(
            f"{path}: no such folder; expected a run folder or one of its step-N folders"
        )
    run_folder = _run_folder(path.resolve())
    config = load(["--config", str(run_folder / CONFIG_NAME)]).config
    if path.resolve() == run_folder:
        return _latest(run_folder, config, open_root(run_folder, config.checkpoint.folder))
    if not path.resolve().name.startswith("step-"):
        return _latest(run_folder, config, LocalRoot(path))
    try:
        step = _verified_step(LocalFolder(path))
    except InvalidCheckpoint as error:
        raise ConfigurationError(f"{path} is not a valid checkpoint: {error}") from error
    return TrainedModel(run_folder, config, LocalFolder(path), step, ())


def find_checkpoint(url: str) -> Folder:
    """The checkpoint that a URL means: a folder of checkpoints (the latest valid one), or one step-N.

    Checksums are verified. Raises ConfigurationError, with the URL and the reason, if there is none.
    """
    parent, _, name = url.rstrip("/").rpartition("/")
    if not STEP_NAME.fullmatch(name):
        return _latest_valid(open_root(Path(), url))[0].folder
    folder = open_root(Path(), parent).folder(name)
    try:
        _verified_step(folder)
    except InvalidCheckpoint as error:
        raise ConfigurationError(f"{url} is not a valid checkpoint: {error}") from error
    return folder


def _run_folder(path: Path) -> Path:
    for folder in (path, *path.parents[:3]):
        if (folder / CONFIG_NAME).is_file():
            return folder
    raise ConfigurationError(
        f"{path}: neither a run folder nor inside one: it holds no {CONFIG_NAME}, nor do the folders above it"
    )


def _latest(run_folder: Path, config: Config, root: Root) -> TrainedModel:
    found, passed_over = _latest_valid(root)
    return TrainedModel(run_folder, config, found.folder, found.step, passed_over)


def _latest_valid(root: Root) -> tuple[Found, tuple[str, ...]]:
    """And a sentence for each later one that is not valid. Raises ConfigurationError if there is none."""
    passed_over: list[str] = []
    for found in list_checkpoints(root):
        try:
            _verified_step(found.folder)
        except InvalidCheckpoint as error:
            passed_over.append(f"{found.folder} is not valid: {error}")
            continue
        return found, tuple(passed_over)
    raise ConfigurationError("; ".join([f"{root} holds no valid checkpoint", *passed_over]))


def _verified_step(folder: Folder) -> int:
    """The step of a valid checkpoint. Raises InvalidCheckpoint."""
    manifest = read_manifest(folder)
    if problems := checksum_problems(folder, manifest.files):
        raise InvalidCheckpoint("; ".join(problems))
    return manifest.step
