"""Bytes of a checkpoint that have changed are found before it is loaded, and none ends in a traceback.

`STAGELINE_FLIPS=all` flips every byte; by default some are drawn, by `STAGELINE_FLIP_SEED`, which is printed.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoint.tiny import Layout, Run, manager
from trainer.errors import StagelineError

SEED = int(os.environ.get("STAGELINE_FLIP_SEED", random.randrange(10**6)))
DRAWN = 30  # of each file

pytestmark = pytest.mark.timeout(3600 if os.environ.get("STAGELINE_FLIPS") == "all" else 300)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    run = Run(Layout(), 0)
    run.train(2)
    assert manager(tmp_path).save(2, run.state) is not None
    return tmp_path


def flips(folder: Path) -> Iterator[tuple[Path, int]]:
    """Changes one byte after another, each put back before the next."""
    choose = random.Random(SEED)
    print(f"STAGELINE_FLIP_SEED={SEED}")
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        positions = range(len(whole))
        if os.environ.get("STAGELINE_FLIPS") != "all":
            positions = choose.sample(positions, min(DRAWN, len(whole)))
        for position in positions:
            changed = bytearray(whole)
            changed[position] ^= choose.randrange(1, 256)
            path.write_bytes(changed)
            yield path, position
        path.write_bytes(whole)


def test_every_changed_byte_is_detected_and_the_checkpoint_is_passed_over(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = set()
    run = Run(Layout(), 0)
    before = run.snapshot()
    for path, position in flips(saved / "step-2"):
        caplog.clear()
        assert manager(saved).load(run.state) is None, (path.name, position)
        assert "CHECKPOINT PASSED OVER" in caplog.text
        assert f"{saved / 'step-2'} is not valid" in caplog.text
        assert not [record for record in caplog.records if record.exc_info], caplog.text
        files.add(path.name)
    np.testing.assert_equal(run.snapshot(), before)
    assert files == {"__0_0.distcp", ".metadata", "manifest.json"}
    assert manager(saved).load(run.state) == 2


def test_where_only_sizes_are_verified_a_changed_byte_loads_or_ends_with_an_error_for_the_user(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    run = Run(Layout(), 0)
    refusals: list[str] = []
    outcomes = {"loaded": 0, "passed over": 0, "refused": 0}
    for _path, _position in flips(saved / "step-2"):
        try:
            step = manager(saved, verify="sizes").load(run.state)
        except StagelineError as error:
            refusals.append(str(error))
            outcomes["refused"] += 1
        else:
            outcomes["passed over" if step is None else "loaded"] += 1
    assert not [record for record in caplog.records if record.name.startswith("trainer") and record.exc_info]
    assert all(outcomes.values()), outcomes
    assert all("step-2" in refusal for refusal in refusals)
