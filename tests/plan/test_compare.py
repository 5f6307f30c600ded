"""Two plans side by side."""

from __future__ import annotations

import json

from tests.plan.configs import config
from trainer.plan.accelerators import find_accelerator
from trainer.plan.compare import PlanComparison, compare_plans, render_comparison
from trainer.plan.plan import make_plan
from trainer.plan.view import view_plan

PLAIN = config("8B", training={"batch_size": 1, "seq_len": 8192})
PIPELINE = config(
    "8B",
    training={"batch_size": 8, "seq_len": 8192},
    experimental={"pipeline_parallel_degree": 4},
)


def compared(first=PLAIN, second=PIPELINE) -> PlanComparison:
    h100 = find_accelerator("H100")
    views = tuple(view_plan(make_plan(each, 32), 8, h100) for each in (first, second))
    return compare_plans(("plain", "pipeline"), (first, second), views)


def test_exactly_the_keys_that_differ_are_told() -> None:
    assert {each.key for each in compared().differences} == {
        "training.batch_size",
        "experimental.pipeline_parallel_degree",
    }


def test_figures_stand_beside_each_other_with_their_ratio() -> None:
    figures = {each.name: each for each in compared().figures}
    assert (figures["pipeline degree"].first, figures["pipeline degree"].second) == (1, 4)
    tokens = figures["tokens per step"]
    assert (tokens.first, tokens.second, tokens.ratio) == (32 * 8192, 8 * 8 * 8192, 2.0)
    assert figures["sent by a rank: activations"].ratio is None
    assert figures["fits"].ratio is None
    assert figures["bubble of the step"].first == 0.0


def test_the_same_plan_twice_differs_in_nothing() -> None:
    same = compared(PLAIN, PLAIN)
    assert same.differences == ()
    assert all(each.first == each.second for each in same.figures)
    assert "The configurations are the same." in render_comparison(same)


def test_the_text_has_both_names_and_the_data_is_plain() -> None:
    comparison = compared()
    text = render_comparison(comparison)
    assert "training.batch_size" in text
    assert "x 4" in text
    data = json.loads(json.dumps(comparison.data()))
    assert data["plans"] == ["plain", "pipeline"]
    assert len(data["figures"]) == len(comparison.figures)
