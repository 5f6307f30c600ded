"""What holds for all tests."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

# Tests of such a file share what is dear to make: one process runs them all.
_TOGETHER = (
    "tests/commands/test_evaluate.py",
    "tests/distributed/test_layout_matrix.py",
    "tests/slurm/test_slurm.py",
    "tests/weights/test_against_transformers.py",
)


def pytest_configure() -> None:
    """The layouts that are drawn at random are the same in all processes that share the tests."""
    os.environ.setdefault("STAGELINE_LAYOUT_SEED", str(random.SystemRandom().randrange(10_000)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each test goes to the process that is free, long files first and as a whole.

    This is `--dist loadgroup` without its way through the tests' names, which pytest 9.2 does not have any more.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if file in _TOGETHER else nodeid

    return Scheduling(config, log)
