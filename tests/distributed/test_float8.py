"""Float8, emulated: the layout does not change what is rounded, where every rank sees the same operands.

Scales come from whole microbatches, so runs are compared that cut the batch in the same microbatches; with weight
gradients in high precision, whose other scales are each token's own, any layout is the same.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

pytest.importorskip("torchao")

from tests.distributed.test_parity import one_process, pipeline
from tests.distributed.training_run import assert_same_run, train

FLOAT8 = {"enable_float8_linear": True, "emulate": True}


def run(world_size: int, training: dict[str, Any], float8: dict[str, Any], **tables: Any) -> Any:
    table = {"training": training, "float8": {**FLOAT8, **float8}, **tables}
    return train(Path(mkdtemp()), world_size, table)


def test_float8_trains_nearly_as_without_it() -> None:
    losses = run(1, {}, {})[0]["losses"]
    assert losses == pytest.approx(one_process(8)[0]["losses"], rel=2e-3)
    assert losses != one_process(8)[0]["losses"]


@pytest.mark.slow
def test_fsdp_that_gathers_in_float8_equals_one_process_with_the_same_microbatches() -> None:
    gather = {"enable_fsdp_float8_all_gather": True, "precompute_float8_dynamic_scale_for_fsdp": True}
    two = {"batch_size": 4, "global_batch_size": 8}
    assert_same_run(run(1, two, {}), run(2, {"batch_size": 4}, gather))


@pytest.mark.slow
def test_any_layout_is_the_same_with_weight_gradients_in_high_precision() -> None:
    precise = {"recipe_name": "rowwise_with_gw_hp"}
    experimental = pipeline(2, "ZBVZeroBubble", 3)
    assert_same_run(run(1, {}, precise), run(4, {"batch_size": 4}, precise, experimental=experimental))


@pytest.mark.slow
def test_tensor_parallel_float8_trains_nearly_as_one_process() -> None:
    """Each rank scales its own parts."""
    losses = run(2, {"tensor_parallel_degree": 2}, {})[0]["losses"]
    assert losses == pytest.approx(one_process(8)[0]["losses"], rel=2e-3)
