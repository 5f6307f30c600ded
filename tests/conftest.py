"""What holds for all tests."""

from __future__ import annotations

import os
import random


def pytest_configure() -> None:
    """The layouts that are drawn at random are the same in all processes that share the tests."""
    os.environ.setdefault("STAGELINE_LAYOUT_SEED", str(random.SystemRandom().randrange(10_000)))
