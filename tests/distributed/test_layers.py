"""What is done to every layer, in layouts: checkpointing and compilation change no loss, norm or gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_parity import one_process, pipeline
from tests.distributed.training_run import assert_same_run, train

OP = {"mode": "selective", "selective_ac_option": "op"}
COMPILED = {"compile": True, "compile_backend": "aot_eager"}


def check(folder: Path, world_size: int, training: dict[str, Any], **tables: dict[str, Any]) -> None:
    results = train(folder, world_size, {"training": training, **tables}, timeout=180)
    assert_same_run(one_process(8), results)


@pytest.mark.slow
def test_checkpointing_by_operation_with_a_split_backward_and_fsdp_changes_nothing(tmp_path: Path) -> None:
    experimental = pipeline(2, "ZBVZeroBubble", 3)
    check(tmp_path, 4, {"batch_size": 4}, experimental=experimental, activation_checkpoint=OP)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [OP, {"mode": "memory_budget"}], ids=str)
def test_compiled_layers_with_fsdp_change_nothing(tmp_path: Path, checkpointing: dict[str, Any]) -> None:
    check(tmp_path, 2, {"batch_size": 4, **COMPILED}, activation_checkpoint=checkpointing)


@pytest.mark.slow
def test_compiled_layers_in_a_pipeline_with_a_split_backward_change_nothing(tmp_path: Path) -> None:
    """Microbatches of 3, 3 and 2 sequences; the weight gradients come with those of the inputs."""
    experimental = pipeline(2, "ZBVZeroBubble", 3)
    check(tmp_path, 2, COMPILED, experimental=experimental, activation_checkpoint={"mode": "full"})
