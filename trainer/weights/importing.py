"""A model from elsewhere becomes a run folder: configuration, tokenizer, and its weights as the checkpoint of step 0."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.checkpoint.digest import sha256
from trainer.checkpoint.folders import step_name
from trainer.checkpoint.manifest import Contents, InvalidCheckpoint, Manifest, describe_files, write_manifest
from trainer.checkpoint.metadata import METADATA_NAME
from trainer.checkpoint.storage import CheckpointReader
from trainer.config.load import config_to_toml
from trainer.config.schema import Config
from trainer.errors import ConfigurationError, StagelineError
from trainer.run_folder import RunFolder
from trainer.weights.checkpoint_writer import FILE_BYTES, Progress, write_weights
from trainer.weights.hugging_face import HuggingFaceModel
from trainer.weights.meta import PARAMS_NAME, MetaModel
from trainer.weights.naming import Named, name_of
from trainer.weights.source import WeightSource
from trainer.weights.staging import Staging
from trainer.weights.tokenizer_files import GENERATION_CONFIG, TOKENIZER_FILES


@dataclass(frozen=True)
class Import:
    """What is imported.

    Attributes:
        source: the weights.
        named: the model in our words.
        files: that decide about the weights; if one is changed, an interrupted import starts anew.
        tokenizer_files: to be copied into the run's tokenizer folder.
        other_files: to be copied into the run folder.
    """

    source: WeightSource
    named: Named
    files: Sequence[Path]
    tokenizer_files: Sequence[Path] = ()
    other_files: Sequence[Path] = ()

    @property
    def size(self) -> int:
        """Bytes of the weights."""
        return sum(form.size for form in self.source.forms.values())


def from_hugging_face(model: HuggingFaceModel) -> Import:
    """What is imported of a Hugging Face folder."""
    folder = model.folder
    tokenizer_files = [folder.path / name for name in TOKENIZER_FILES]
    return Import(
        model.source,
        name_of(model.sizes),
        [folder.path / "config.json", *folder.files],
        [path for path in tokenizer_files if path.is_file()],
        [path for path in [folder.path / GENERATION_CONFIG] if path.is_file()],
    )


def from_meta(model: MetaModel) -> Import:
    """What is imported of a folder of Meta's."""
    files = [model.path / PARAMS_NAME, *sorted(model.path.glob("consolidated.*.pth"))]
    tokenizer = model.path / "tokenizer.model"
    return Import(model.source, name_of(model.sizes), files, [tokenizer] if tokenizer.is_file() else [])


def write_run_folder(
    imported: Import,
    target: Path,
    progress: Progress = lambda size: None,
    say: Callable[[str], None] = lambda line: None,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write the run folder at `target`, streaming; an interrupted call is gone on with by the next.

    Raises:
        ConfigurationError: there is something at `target` already.
        StagelineError: it cannot be written.
    """
    try:
        origin = {"files": [_identity(path) for path in imported.files], "bytes": file_bytes}
        staging = Staging(target, origin, sha256)
        config = configuration(imported.named)
        step = staging.path / config.checkpoint.folder / step_name(0)
        entries = write_weights(step, imported.source, staging, progress, file_bytes)
        say("verifying what was written")
        _verify(step, imported.source)
        entries += describe_files(step, [METADATA_NAME])
        write_manifest(step, Manifest(0, Contents.WEIGHTS, "imported", 1, tuple(entries)))
        (staging.path / "config.toml").write_text(config_to_toml(config), encoding="utf-8")
        _copy(imported.tokenizer_files, RunFolder(staging.path).tokenizer)
        _copy(imported.other_files, staging.path)
        staging.publish()
    except OSError as error:
        raise StagelineError(f"{target}: cannot be written: {error.strerror}: {error.filename}") from error


def configuration(named: Named) -> Config:
    """The configuration of a run whose model is this one."""
    return Config.model_validate(
        {
            "model": {
                "name": named.name,
                "flavor": named.flavor,
                "norm_type": named.norm_type,
                "override": dict(named.override),
            },
            "training": {"seq_len": named.sizes.max_seq_len},
        }
    )


def _verify(step: Path, source: WeightSource) -> None:
    """Every tensor is described in the checkpoint, with its shape, and no other."""
    try:
        reader = CheckpointReader(step)
    except InvalidCheckpoint as error:
        raise StagelineError(f"{step}: {error}") from error
    expected: Mapping[str, Any] = {name: form.shape for name, form in source.forms.items()}
    written = {name: reader.shape("model", name) for name in reader.names("model")}
    if written != expected:
        raise StagelineError(f"{step} does not describe the tensors that were written")


def _identity(path: Path) -> list[str | int]:
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from error
    return [str(path.resolve()), status.st_size, status.st_mtime_ns]


def _copy(files: Sequence[Path], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in files:
        shutil.copyfile(path, folder / path.name)
