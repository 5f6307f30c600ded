"""Rules about training on this machine, now."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainer.checkpoint.filesystem import is_url
from trainer.config.machine import Machine, this_machine
from trainer.config.report import Problem
from trainer.config.rules.model import sizes_of
from trainer.config.rules.training import data_ranks
from trainer.config.schema import Config

if TYPE_CHECKING:
    from trainer.config.load import Loaded

BYTES_PER_PARAMETER = 16
"""Of training state: parameter, gradient and both moments of Adam, in float32."""

OPERATIONS_PER_CORE_SECOND = 100e9
"""More than a processor core reaches in float32, so that what follows is never too pessimistic."""

LONGEST_STEP_SECONDS = 600


def machine_suits_the_model(
    loaded: Loaded, world_size: int, machine: Machine | None = None
) -> Iterator[Problem]:
    """Without a GPU the training state of the ranks here fits the host's memory, and a step ends within minutes.

    Both sides are counted in favour of the configuration: no activations, an ideal processor. `machine` is for
    tests; without it, this one.
    """
    config = loaded.config
    machine = machine or this_machine()
    sizes = sizes_of(config)
    if machine.gpus or sizes is None:
        return
    here = min(world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
    parameters = sizes.parameter_count()
    # Replicas each keep a whole copy; pipeline and shard ranks share one.
    replicate = config.training.data_parallel_replicate_degree
    state = BYTES_PER_PARAMETER * parameters * replicate * here / world_size
    seconds = _step_seconds(config, world_size, sizes.flops_per_token(config.training.seq_len), here, machine)
    reasons = []
    if state > machine.memory:
        reasons.append(
            f"its training state is {_gib(state)} GiB and this machine has {_gib(machine.memory)} GiB of memory"
        )
    if seconds > LONGEST_STEP_SECONDS:
        reasons.append(f"one step on {machine.cores} cores would take over {seconds / 60:.0f} minutes")
    if reasons:
        model = f"{config.model.name} {config.model.flavor} ({parameters / 1e9:.3g} billion parameters)"
        yield Problem(
            (),
            f"{model} needs an accelerator, and there is none here: {', and '.join(reasons)}; "
            f"`stageline plan --config {loaded.path.name}` shows what it needs, "
            f"and without --config the debug model trains on any machine",
            place=loaded.shown_path,
        )


def wandb_is_installed(loaded: Loaded) -> Iterator[Problem]:
    """The library is there before hours of training find that it is not."""
    if loaded.config.metrics.enable_wandb and importlib.util.find_spec("wandb") is None:
        yield Problem(("metrics.enable_wandb",), "wandb is not installed: pip install wandb", "false")


def torch_places_experts(loaded: Loaded, installed: str | None = None) -> Iterator[Problem]:
    """FSDP2 places single parameters on a mesh of their own since torch 2.12. `installed` is for tests."""
    degree = loaded.config.experimental.expert_parallel_degree
    version = installed or importlib.metadata.version("torch")
    if degree > 1 and tuple(map(int, version.split(".")[:2])) < (2, 12):
        yield Problem(
            ("experimental.expert_parallel_degree",), f"needs torch 2.12 or newer; this is {version}", "1"
        )


def checkpoint_to_load_exists(loaded: Loaded) -> Iterator[Problem]:
    """The step to go on from was saved by this run."""
    checkpoint = loaded.config.checkpoint
    if checkpoint.load_step == -1 or not checkpoint.enable_checkpoint:
        return
    if is_url(checkpoint.folder):
        return  # asking would need the network, here and on every rank
    folder = loaded.dump_folder / checkpoint.folder
    if not (folder / f"step-{checkpoint.load_step}").is_dir():
        saved = sorted(int(path.name[5:]) for path in folder.glob("step-*") if path.name[5:].isdecimal())
        allowed = f"-1 or one of {', '.join(map(str, saved))}" if saved else "-1"
        yield Problem(("checkpoint.load_step",), f"there is no checkpoint of this step in {folder}", allowed)


def _step_seconds(
    config: Config, world_size: int, flops_per_token: int, here: int, machine: Machine
) -> float:
    training = config.training
    ranks = data_ranks(config, world_size) or 1
    sequences = training.global_batch_size or training.batch_size * ranks
    operations = sequences * training.seq_len * flops_per_token * here / world_size
    return operations / (machine.cores * OPERATIONS_PER_CORE_SECOND)


def _gib(size: float) -> str:
    return f"{size / 2**30:,.0f}"
