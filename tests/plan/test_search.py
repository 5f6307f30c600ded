"""The search: proposals that fit, best first, that can be planned as they are, in bounded work."""

from __future__ import annotations

import json
import sys

import pytest

from tests.plan.configs import config
from trainer.config.rules import check
from trainer.config.schema import Config
from trainer.errors import ConfigurationError
from trainer.plan.accelerators import find_accelerator
from trainer.plan.candidates import candidates
from trainer.plan.memory import forecast_memory
from trainer.plan.nodes import place_in_nodes
from trainer.plan.plan import make_plan
from trainer.plan.proposal import Proposal, SearchResult, usable_memory
from trainer.plan.render_search import render_search
from trainer.plan.search import search_layouts, sequences_per_step
from trainer.plan.speed import estimate_step
from trainer.plan.splits import Splits

H100 = find_accelerator("H100")
LLAMA = config(
    "8B",
    training={"batch_size": 1, "seq_len": 8192, "global_batch_size": 256},
    activation_checkpoint={"mode": "full"},
)


@pytest.fixture(scope="module")
def result() -> SearchResult:
    return search_layouts(LLAMA, 64, H100)


def proposed(proposal: Proposal, base: Config) -> Config:
    """The configuration that the command line of a proposal makes of `base`."""
    tables = base.model_dump()
    for key, text in zip(proposal.arguments[::2], proposal.arguments[1::2], strict=True):
        table, name = key.removeprefix("--").split(".")
        current = tables[table][name]
        is_text = name.endswith(("schedule", "points", "mode")) or isinstance(current, str)
        tables[table][name] = text if is_text else int(text)
    return Config.model_validate(tables)


def test_proposals_fit_and_come_best_first(result: SearchResult) -> None:
    assert 3 <= len(result.proposals) <= 5
    assert all(each.peak <= usable_memory(H100) for each in result.proposals)
    for one, other in zip(result.proposals, result.proposals[1:], strict=False):
        assert one.seconds <= 1.006 * other.seconds


def test_proposals_keep_the_tokens_of_a_step_and_can_be_planned_as_they_are(result: SearchResult) -> None:
    for proposal in result.proposals:
        wanted = proposed(proposal, LLAMA)
        assert check(wanted, 64) == []
        plan = make_plan(wanted, 64)
        assert plan.global_batch_size == 256
        peak = max(rank.peak.total for rank in forecast_memory(plan))
        assert peak == pytest.approx(proposal.peak, rel=0.01)
        estimate = estimate_step(plan, H100, place_in_nodes(plan.layout, 8))
        assert estimate is not None
        assert estimate.seconds == pytest.approx(proposal.seconds, rel=0.02)


def test_the_first_is_better_than_what_a_beginner_would_write(result: SearchResult) -> None:
    plan = make_plan(LLAMA, 64)
    estimate = estimate_step(plan, H100, place_in_nodes(plan.layout, 8))
    assert estimate is not None
    assert result.configured is not None
    assert result.configured.peak <= usable_memory(H100)
    assert result.proposals[0].seconds < 0.9 * estimate.seconds
    assert result.configured.seconds == pytest.approx(estimate.seconds)


def test_nothing_smaller_that_was_considered_is_faster_than_the_first() -> None:
    # Small enough to plan every candidate: the search must not have thrown the best away.
    wanted = config(training={"batch_size": 4, "seq_len": 2048})
    accelerator = find_accelerator("L40S")
    found = search_layouts(wanted, 4, accelerator, top=3)
    assert found.complete
    splits = Splits(make_plan(wanted, 4).sizes, 2048)
    fastest = float("inf")
    for candidate in candidates(4, 8, 16, 2048, splits):
        split = splits.of(candidate.placement.stages, candidate.by_parameters)
        data_ranks = 4 // candidate.pipeline
        plan = make_plan(candidate.applied_to(wanted, split, 1, data_ranks, 10**6), 4)
        estimate = estimate_step(plan, accelerator, place_in_nodes(plan.layout, 8))
        assert estimate is not None
        fastest = min(fastest, estimate.seconds)
    assert found.proposals[0].seconds <= 1.006 * fastest


def test_little_memory_makes_it_checkpoint_or_cut_and_less_makes_it_say_what_is_missing() -> None:
    small_steps = config("8B", training={"batch_size": 1, "seq_len": 8192})
    tight = search_layouts(small_steps, 64, find_accelerator("A10"), top=1)
    assert tight.proposals
    assert all(each.candidate.checkpointing != "none" for each in tight.proposals)
    hopeless = search_layouts(config("70B", training={"batch_size": 1}), 8, find_accelerator("A10"))
    assert hopeless.proposals == ()
    assert hopeless.nearest is not None
    text = render_search(hopeless)
    assert "No layout fits" in text
    assert "times what there is" in text


def test_the_text_gives_reasons_and_how_to_get_each(result: SearchResult) -> None:
    text = render_search(result)
    for number, proposal in enumerate(result.proposals, start=1):
        assert f"\n{number}. " in text
        assert " ".join(proposal.arguments) in text
    assert "slower than the first: its bubble is larger" in text
    assert "As configured" in text or "the configuration as it is" in text


def test_all_of_it_is_plain_data_and_the_same_every_time(result: SearchResult) -> None:
    once = json.dumps(result.data())
    assert once == json.dumps(search_layouts(LLAMA, 64, H100).data())
    assert json.loads(once)["proposals"][0]["seconds"] == result.proposals[0].seconds


@pytest.mark.slow
def test_the_work_of_a_search_is_bounded_however_large_the_step() -> None:
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    large = config("8B", training={"batch_size": 1, "seq_len": 8192, "global_batch_size": 8192})
    sys.setprofile(count)
    try:
        search_layouts(large, 16, H100)
    finally:
        sys.setprofile(None)
    assert calls < 25_000_000


def test_sequences_of_a_step_are_those_of_the_configuration() -> None:
    assert sequences_per_step(LLAMA, 64) == 256
    assert sequences_per_step(config(training={"batch_size": 3}), 8) == 24


def test_an_impossible_number_of_sequences_is_refused_with_a_possible_one() -> None:
    # Eight layers make no pipeline of eleven ranks, and three sequences cannot be shared by eleven.
    odd = config(training={"batch_size": 1, "global_batch_size": 3})
    with pytest.raises(ConfigurationError, match="steps of 3 sequences cannot be shared evenly"):
        search_layouts(odd, 11, H100)


def test_a_kind_of_accelerator_of_unknown_speed_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="CPU"):
        search_layouts(LLAMA, 64, find_accelerator("CPU"))


def test_a_format_of_unknown_speed_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="mixed_precision_param = float32"):
        search_layouts(config(training={"mixed_precision_param": "float32"}), 4, H100)
