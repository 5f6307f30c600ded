"""The parity matrix: a layout changes nothing of what is trained, whichever dimensions it puts together.

Losses, gradient norms and every gradient of three optimizer steps are those of one process, and the initial
parameters are, bit for bit. `STAGELINE_LAYOUT_SEED` chooses the seed of the layouts that are drawn at random.
"""

from __future__ import annotations

import os
import random

import pytest

from tests.distributed.layouts import LAYOUTS, Trial, draw
from tests.distributed.matrix_run import run_matrix

SEED = int(os.environ.get("STAGELINE_LAYOUT_SEED") or random.SystemRandom().randrange(10_000))
DRAWN = tuple(draw(SEED, 16))

pytestmark = pytest.mark.timeout(1200)  # all layouts run in the first test


def cases(trials: tuple[Trial, ...], prefix: str = "") -> list[object]:
    return [
        pytest.param(t, id=f"{prefix}{t.name}", marks=[] if t.quick else [pytest.mark.slow]) for t in trials
    ]


@pytest.fixture(scope="module")
def differences(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Trial, str]:
    """What differs in each of the layouts that are among the selected tests, all run together."""
    items = [item for item in request.session.items if item.path == request.path]
    chosen = dict.fromkeys(item.callspec.params["trial"] for item in items if hasattr(item, "callspec"))
    return run_matrix(list(chosen), tmp_path_factory.mktemp("matrix"))


@pytest.mark.parametrize("trial", cases(LAYOUTS))
def test_a_layout_is_the_same_training_run(trial: Trial, differences: dict[Trial, str]) -> None:
    assert not differences[trial], f"{trial.name}: {differences[trial]}"


@pytest.mark.parametrize("trial", cases(DRAWN, f"seed {SEED} "))
def test_a_layout_drawn_at_random_is_the_same_training_run(
    trial: Trial, differences: dict[Trial, str]
) -> None:
    print(f"STAGELINE_LAYOUT_SEED={SEED}")
    assert not differences[trial], f"STAGELINE_LAYOUT_SEED={SEED} {trial.name}: {differences[trial]}"
