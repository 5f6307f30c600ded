"""Draws follow temperature, top-k and top-p."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.sampling import Sampling, draw, probabilities

LOGITS = torch.tensor([[2.0, 0.0, 1.0, -1.0]])


def test_top_k_keeps_the_k_most_likely() -> None:
    kept = probabilities(LOGITS, Sampling(1.0, top_k=2))
    torch.testing.assert_close(kept, torch.tensor([[2.0, -torch.inf, 1.0, -torch.inf]]).softmax(-1))
    assert torch.equal(probabilities(LOGITS, Sampling(1.0, top_k=99)), LOGITS.softmax(-1))


def test_top_p_keeps_the_fewest_tokens_that_suffice() -> None:
    # Probabilities 0.64, 0.09, 0.24, 0.03.
    assert (probabilities(LOGITS, Sampling(1.0, top_p=0.6)) > 0).tolist() == [[True, False, False, False]]
    assert (probabilities(LOGITS, Sampling(1.0, top_p=0.7)) > 0).tolist() == [[True, False, True, False]]
    assert (probabilities(LOGITS, Sampling(1.0, top_p=1e-9)) > 0).sum() == 1
    torch.testing.assert_close(probabilities(LOGITS, Sampling(1.0, top_p=1.0)), LOGITS.softmax(-1))


def test_a_low_temperature_sharpens_and_draws_follow_the_distribution() -> None:
    assert probabilities(LOGITS, Sampling(0.1))[0, 0] > 0.9999
    draws = draw(LOGITS.expand(4000, 4), Sampling(1.0), torch.Generator().manual_seed(0))
    frequencies = torch.bincount(draws.flatten(), minlength=4) / 4000
    torch.testing.assert_close(frequencies, LOGITS.softmax(-1)[0], rtol=0, atol=0.03)


@given(
    st.lists(st.floats(-20, 20), min_size=1, max_size=12),
    st.floats(0.05, 5),
    st.none() | st.integers(1, 15),
    st.none() | st.floats(0.01, 1),
)
def test_what_is_drawn_from_is_a_distribution_of_the_most_likely_tokens(
    logits: list[float], temperature: float, top_k: int | None, top_p: float | None
) -> None:
    row = torch.tensor([logits])
    kept = probabilities(row, Sampling(temperature, top_k, top_p))[0]
    likelihood = probabilities(row, Sampling(temperature))[0]
    assert abs(float(kept.sum()) - 1) < 1e-4
    assert kept[row[0].argmax()] > 0
    assert likelihood[kept > 0].min() >= likelihood.masked_fill(kept > 0, 0).max()
    if top_k is not None:
        worst = likelihood.topk(min(top_k, len(logits))).values[-1]
        assert (kept > 0).sum() <= (
            likelihood >= worst
        ).sum()  # more than k only where some are equally likely
    token = draw(row, Sampling(temperature, top_k, top_p), torch.Generator().manual_seed(0))
    assert kept[token[0, 0]] > 0
