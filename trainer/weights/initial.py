"""The weights that a run starts from, instead of drawing them: `[checkpoint] initial_load_path`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from models.family import Family
from models.registry import family
from trainer.checkpoint.agreement import Ranks
from trainer.checkpoint.filesystem import Folder, is_url
from trainer.checkpoint.manifest import Contents, InvalidCheckpoint, read_manifest
from trainer.checkpoint.restore import restore_full, restore_weights
from trainer.checkpoint.state import TrainState
from trainer.checkpoint.storage import CheckpointReader
from trainer.checkpoint.weights import find_checkpoint, find_trained_model
from trainer.config.schema import Config
from trainer.errors import ConfigurationError
from trainer.weights.folder import is_hugging_face_folder, read_config
from trainer.weights.hugging_face import open_model
from trainer.weights.naming import differences, sizes_of
from trainer.weights.torchtitan import is_torchtitan_folder, open_torchtitan


def load_initial(
    config: Config, sizes: Any, state: TrainState, ranks: Ranks, say: Callable[[str], None]
) -> int:
    """Set the weights of all ranks, each of which reads the part that it holds. Collective.

    Args:
        config: with `checkpoint.initial_load_path`.
        sizes: of the model.
        state: the run; if more than weights is loaded, all of it is set.
        ranks: all ranks.
        say: told from where, on every rank.

    Returns:
        Training steps made: 0, unless the run goes on from a whole checkpoint.

    Raises:
        ConfigurationError: there is no such folder, no valid checkpoint in it, or one of another model; on all ranks.
        FailedOnSomeRank: a rank could not read it.
    """
    table = config.checkpoint
    assert table.initial_load_path is not None
    path = Path(table.initial_load_path).expanduser()
    if ranks.on_first(lambda: is_hugging_face_folder(path)):
        of = family(config.model.name)
        model = ranks.agreed(lambda: open_model(path, sizes, [of]))
        restore_weights(model.reader, state.model_parts, ranks)
        say(f"weights of {path}{_notice(path, sizes, of)}")
        return 0
    if ranks.on_first(lambda: is_torchtitan_folder(path)):
        if not table.initial_load_model_only:
            raise ConfigurationError(
                f"checkpoint.initial_load_model_only = false: {path} is of torchtitan, of which the weights are loaded"
            )
        restore_weights(ranks.agreed(lambda: open_torchtitan(path)), state.model_parts, ranks)
        say(f"weights of {path}, a checkpoint of torchtitan")
        return 0
    # One rank verifies the checksums, for all.
    step_folder = ranks.on_first(lambda: _find(table.initial_load_path or "", path))
    reader = ranks.agreed(lambda: _open(step_folder))
    if table.initial_load_model_only:
        restore_weights(reader, state.model_parts, ranks)
        say(f"weights of {step_folder}")
        return 0
    if read_manifest(step_folder).contents is not Contents.FULL:
        raise ConfigurationError(
            f"checkpoint.initial_load_model_only = false: {step_folder} holds only weights, to go on needs more"
        )
    say(f"going on from {step_folder}")
    return restore_full(reader, state, ranks, table.exclude_from_loading)


def _find(given: str, path: Path) -> Folder:
    return find_checkpoint(given) if is_url(given) else find_trained_model(path).step_folder


def _open(step_folder: Folder) -> CheckpointReader:
    try:
        return CheckpointReader(step_folder)
    except InvalidCheckpoint as error:
        raise ConfigurationError(f"{step_folder} is not a valid checkpoint: {error}") from error


def _notice(path: Path, sizes: Any, of: Family) -> str:
    """What the folder's configuration says otherwise, e.g. of rotary positions: allowed, but worth a word."""
    there = sizes_of(read_config(path), path, [of])
    return "" if there == sizes else f" (its configuration differs: {differences(there, sizes)})"
