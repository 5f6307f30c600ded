"""The parity matrix: a layout changes nothing of what is trained, whichever dimensions it puts together.

Losses, gradient norms and every gradient of three optimizer steps are those of one process, and the initial
parameters are, bit for bit. `STAGELINE_LAYOUT_SEED` chooses the seed of the layouts that are drawn at random.
"""

from __future__ import annotations

import os
from itertools import combinations

import pytest

from tests.distributed.layouts import DIMENSIONS, LAYOUTS, MIXTURES, Trial, draw
from tests.distributed.matrix_run import run_matrix

SEED = int(os.environ["STAGELINE_LAYOUT_SEED"])
DRAWN = draw(SEED, 16)

# All layouts run in the first test.
pytestmark = pytest.mark.timeout(1200)


def cases(trials: tuple[Trial, ...], prefix: str = "") -> list[object]:
    return [
        pytest.param(t, id=f"{prefix}{t.name}", marks=[] if t.quick else [pytest.mark.slow]) for t in trials
    ]


@pytest.fixture(scope="module")
def differences(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Trial, str]:
    """What differs in each of the layouts that are among the selected tests, all run together."""
    items = [item for item in request.session.items if item.path == request.path]
    arguments = [item.callspec.params for item in items if hasattr(item, "callspec")]
    chosen = dict.fromkeys(each["trial"] for each in arguments if "trial" in each)
    return run_matrix(list(chosen), tmp_path_factory.mktemp("matrix"))


def test_the_matrix_has_every_dimension_alone_every_pair_and_several_triples() -> None:
    assert len(LAYOUTS) >= 40
    assert len({trial.name for trial in LAYOUTS}) == len(LAYOUTS)
    assert {trial.world_size for trial in LAYOUTS} == {1, 2, 4, 8}
    used = {trial.dimensions for trial in LAYOUTS}
    # Experts are spread over data-parallel or context ranks, so never alone.
    assert {frozenset({name}) for name in DIMENSIONS[:-1]} < used
    for pair in combinations(DIMENSIONS, 2):
        assert any(set(pair) <= dimensions for dimensions in used), pair
    assert len([dimensions for dimensions in used if len(dimensions) >= 3]) >= 10


@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_the_matrix_has_every_dimension_with_everything_else(dimension: str) -> None:
    trials = [trial for trial in LAYOUTS if dimension in trial.dimensions]
    assert {trial.model for trial in trials} >= (
        {*MIXTURES} if dimension == "expert" else {"llama3", *MIXTURES}
    )
    assert {trial.checkpointing != "none" for trial in trials} == {True, False}
    assert {trial.compiled for trial in trials} == {True, False}
    assert {trial.accumulation > 1 for trial in trials} == {True, False}
    assert {trial.microbatches > 1 for trial in trials} == {True, False}
    assert len({trial.schedule for trial in trials if trial.pipeline > 1}) >= 2


def test_sixteen_layouts_are_drawn_and_a_seed_gives_the_same_again() -> None:
    assert len(DRAWN) == 16
    assert draw(SEED, 16) == DRAWN


@pytest.mark.parametrize("trial", cases(LAYOUTS))
def test_a_layout_is_the_same_training_run(trial: Trial, differences: dict[Trial, str]) -> None:
    assert not differences[trial], f"{trial.name}: {differences[trial]}"


@pytest.mark.parametrize("trial", cases(DRAWN, f"seed {SEED} "))
def test_a_layout_drawn_at_random_is_the_same_training_run(
    trial: Trial, differences: dict[Trial, str]
) -> None:
    print(f"STAGELINE_LAYOUT_SEED={SEED}")
    assert not differences[trial], f"STAGELINE_LAYOUT_SEED={SEED} {trial.name}: {differences[trial]}"
