"""Rules of what [checkpoint] loads at the start and exports at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from models import registry
from models.hf import UnsupportedConfig
from models.sizes import Sizes
from trainer.checkpoint.filesystem import is_url, open_root
from trainer.config.report import Problem, nearest
from trainer.config.rules.model import sizes_of
from trainer.config.schema import Config
from trainer.errors import ConfigurationError
from trainer.weights.folder import is_hugging_face_folder, read_config
from trainer.weights.naming import differences, hugging_face_format
from trainer.weights.naming import sizes_of as sizes_of_folder

EXCLUDABLE = ("optimizer", "lr_scheduler", "dataloader")

_PATH = "checkpoint.initial_load_path"


def excluded_parts_are_known(config: Config, _world_size: int | None) -> Iterator[Problem]:
    """What is not loaded is a part of a checkpoint that can start anew."""
    for name in config.checkpoint.exclude_from_loading:
        if name not in EXCLUDABLE:
            near = nearest(name, EXCLUDABLE)
            message = "names a part that cannot be left out of loading"
            yield Problem(
                ("checkpoint.exclude_from_loading",), message, f"of {', '.join(EXCLUDABLE)}", near, name
            )


def initial_loading_needs_a_path(config: Config, _world_size: int | None) -> Iterator[Problem]:
    """How to load says nothing where nothing is loaded."""
    checkpoint = config.checkpoint
    if checkpoint.initial_load_path is not None:
        return
    for key, neutral in (("initial_load_in_hf", False), ("initial_load_model_only", True)):
        if getattr(checkpoint, key) is not neutral:
            message = f"has no effect without {_PATH}"
            yield Problem((f"checkpoint.{key}", _PATH), message, str(neutral).lower())


def export_at_the_end_needs_checkpoints(config: Config, _world_size: int | None) -> Iterator[Problem]:
    """The weights are exported from the last checkpoint."""
    checkpoint = config.checkpoint
    if checkpoint.last_save_in_hf and not checkpoint.enable_checkpoint:
        yield Problem(
            ("checkpoint.last_save_in_hf", "checkpoint.enable_checkpoint"),
            "has no effect while checkpoint.enable_checkpoint is false",
            suggestion="checkpoint.enable_checkpoint = true",
        )


def exported_model_has_a_form_there(config: Config, _world_size: int | None) -> Iterator[Problem]:
    """Before hours of training: Hugging Face's format can say what the model is."""
    sizes = sizes_of(config)
    if not config.checkpoint.last_save_in_hf or sizes is None:
        return
    key, form = "checkpoint.last_save_in_hf", hugging_face_format(registry.family(config.model.name))
    if form is None:
        yield Problem(
            (key, "model.name"), f"{config.model.name} has no module hf with Hugging Face's names", "false"
        )
        return
    try:
        form.config_of(sizes)
    except UnsupportedConfig as error:
        yield Problem((key,), f"this model has no form there: {error}", "false")


def folder_can_be_opened(config: Config, _world_size: int | None) -> Iterator[Problem]:
    """A URL for the checkpoints is of a kind that fsspec knows here; whether anything answers is found later."""
    checkpoint = config.checkpoint
    if checkpoint.enable_checkpoint and is_url(checkpoint.folder):
        yield from _opens("checkpoint.folder", checkpoint.folder)


def initial_weights_are_of_the_model(config: Config, _world_size: int | None) -> Iterator[Problem]:
    """The folder with the first weights is there, and is of a model with tensors of the same shapes."""
    name, sizes = config.checkpoint.initial_load_path, sizes_of(config)
    if name is None:
        return
    path = Path(name).expanduser()
    if is_url(name):
        yield from _opens(_PATH, name)
    elif not path.is_dir():
        yield Problem((_PATH,), "there is no such folder")
    elif is_hugging_face_folder(path):
        yield from _of_a_hugging_face_folder(config, path, sizes)
    elif config.checkpoint.initial_load_in_hf:
        message = "holds no config.json, so it is no Hugging Face folder"
        yield Problem((_PATH, "checkpoint.initial_load_in_hf"), message)


def _opens(key: str, url: str) -> Iterator[Problem]:
    try:
        open_root(Path(), url)
    except ConfigurationError as error:
        yield Problem((key,), str(error), "a path, or a URL of a file system that is installed")


def _of_a_hugging_face_folder(config: Config, path: Path, sizes: Sizes | None) -> Iterator[Problem]:
    if not config.checkpoint.initial_load_model_only:
        keys = ("checkpoint.initial_load_model_only", _PATH)
        yield Problem(keys, "a Hugging Face folder holds weights only", "true")
    if sizes is None:
        return
    try:
        there = sizes_of_folder(read_config(path), path, [registry.family(config.model.name)])
    except ConfigurationError as error:
        yield Problem((_PATH,), str(error))
        return
    if _shapes(there) != _shapes(sizes):
        yield Problem(
            (_PATH, "model.name", "model.flavor"), f"is of another model: {differences(there, sizes)}"
        )


def _shapes(sizes: Any) -> Mapping[str, tuple[int, ...]]:
    """Of all tensors but the output, which can be made of the embedding where theirs is tied."""
    modules = [module for module in sizes.modules() if module != "output"]
    return {name: shape for module in modules for name, shape in sizes.parameter_shapes(module).items()}
