"""Forty kills by signal 9 at random moments, also within saves, the manifest and retention: nothing is lost.

What the runs are resumed to is bit for bit what they would have been: metrics, parameters, optimizer, counters.
STAGELINE_KILL_SEED=7 repeats the moments drawn from seed 7; what is drawn is printed.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.distributed.kill_drill import Drill
from tests.distributed.program import pipeline, tiny

SYNC, ASYNC = "--checkpoint.async_mode disabled", "--checkpoint.async_mode async"
KEEP = "--checkpoint.interval 2 --checkpoint.keep_latest_k 2"


def drill(folder: Path, ranks: int, kills: int, mode: str, layout: str = "") -> None:
    seed = int(os.environ.get("STAGELINE_KILL_SEED") or random.SystemRandom().randrange(10**6))
    print(f"STAGELINE_KILL_SEED={seed}")

    def arguments(target: Path) -> list[str]:
        return tiny(target, layout, KEEP, mode, steps=24)

    moments = Drill(folder, arguments, ranks, seed).kill(kills, changes_per_save=10)
    print(*moments, sep="\n")
    assert len(moments) == kills


@pytest.mark.parametrize("mode", [SYNC, ASYNC])
def test_three_kills(tmp_path: Path, mode: str) -> None:
    drill(tmp_path, 1, 3, mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [SYNC, ASYNC])
def test_fifteen_kills(tmp_path: Path, mode: str) -> None:
    drill(tmp_path, 1, 15, mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [SYNC, ASYNC])
def test_five_kills_of_four_ranks(tmp_path: Path, mode: str) -> None:
    """Pipeline 2 x shard 2."""
    drill(tmp_path, 4, 5, mode, pipeline(2))
