"""Generation: neither the cache nor other prompts beside it change a text."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models import registry
from models.initialize import initialize_parameters
from models.layers.cache import CacheFull
from models.layers.decoder import Decoder
from models.llama.model import Transformer
from models.llama.sizes import LlamaSizes
from models.sizes import RopeScaling
from tests.distributed.tiny_families import FAMILIES
from trainer.generation import Continuation, generate
from trainer.sampling import Sampling

TINY = LlamaSizes(
    dim=32,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    ffn_hidden=48,
    vocab_size=61,
    max_seq_len=64,
    rope_scaling=RopeScaling(original_max_seq_len=16),
)
GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def model() -> Transformer:
    model = Transformer(TINY)
    initialize_parameters(model, 0)
    return model


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=6))
def test_logits_with_a_cache_equal_those_without_for_any_portions(portions: list[int]) -> None:
    model = Transformer(TINY)
    initialize_parameters(model, 0)
    tokens = torch.randint(61, (2, sum(portions)), generator=torch.Generator().manual_seed(0))
    cache = model.new_cache(2, sum(portions))
    with torch.no_grad():
        whole = model(tokens)
        parts = [model(part, cache=cache) for part in tokens.split(portions, dim=1)]
    assert cache.length == sum(portions)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0, top_k=20, top_p=0.9)])
def test_text_with_a_cache_equals_that_without(model: Transformer, sampling: Sampling) -> None:
    cached = list(generate(model, [1, 2, 3], 30, sampling))
    assert len(cached) == 30
    assert cached == list(generate(model, [1, 2, 3], 30, sampling, use_cache=False))


def test_greedy_text_takes_the_most_likely_token(model: Transformer) -> None:
    tokens = [5]
    for token in generate(model, tokens, 5, GREEDY):
        with torch.no_grad():
            assert token == model(torch.tensor([tokens]))[0, -1].argmax()
        tokens = [*tokens, token]


def test_the_seed_alone_decides_the_draws(model: Transformer) -> None:
    texts = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(texts))
        texts.append(list(generate(model, [1], 20, Sampling(1.0), seed)))
    assert texts[0] == texts[1] != texts[2]


def test_the_stop_token_ends_the_text_and_is_not_part_of_it(model: Transformer) -> None:
    text = list(generate(model, [1], 20, Sampling(1.0)))
    stop = text[7]
    assert list(generate(model, [1], 20, Sampling(1.0), stop={stop})) == text[: text.index(stop)]


def test_the_callers_gradient_mode_is_left_alone(model: Transformer) -> None:
    for _ in generate(model, [1], 2, GREEDY):
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()


def test_a_prompt_of_no_tokens_is_refused(model: Transformer) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        next(generate(model, [], 1, GREEDY))
    with pytest.raises(ValueError, match="at least one token"):
        Continuation(model, [[1], []], 1, GREEDY, [0, 0])


def test_a_full_cache_is_refused(model: Transformer) -> None:
    cache = model.new_cache(1, 4)
    model(torch.zeros(1, 3, dtype=torch.long), cache=cache)
    with pytest.raises(CacheFull, match="5 tokens in a key-value cache made for 4"):
        model(torch.zeros(1, 2, dtype=torch.long), cache=cache)


def all_texts(texts: Continuation, prompts: int) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(prompts)]
    while not texts.done:
        for text, token in zip(found, texts.step(), strict=True):
            if token is not None:
                text.append(token)
    return found


@settings(max_examples=25, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=9), min_size=1, max_size=5),
    sampling=st.sampled_from([GREEDY, Sampling(1.0), Sampling(0.7, top_k=10, top_p=0.9)]),
    use_cache=st.booleans(),
    stop=st.sets(st.integers(0, 60), max_size=5),
)
def test_each_text_of_a_batch_is_that_of_its_prompt_alone(
    prompts: list[list[int]], sampling: Sampling, use_cache: bool, stop: set[int]
) -> None:
    model = Transformer(TINY)
    initialize_parameters(model, 0)
    seeds = range(7, 7 + len(prompts))
    texts = Continuation(model, prompts, 8, sampling, seeds, stop, use_cache=use_cache)
    alone = [list(generate(model, p, 8, sampling, s, stop)) for p, s in zip(prompts, seeds, strict=True)]
    assert all_texts(texts, len(prompts)) == alone


def family_model(family: str) -> Decoder:
    sizes = registry.configured_sizes(family, "debug", "rmsnorm", FAMILIES[family])
    model = registry.family(family).build(sizes)
    initialize_parameters(model, 0)
    return model.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_with_every_family_neither_the_cache_nor_the_batch_changes_a_text(family: str) -> None:
    model = family_model(family)
    prompts = [[5, 6, 7, 8], [9], [1, 2]]
    alone = [list(generate(model, prompt, 12, GREEDY, use_cache=False)) for prompt in prompts]
    assert len({tuple(text) for text in alone}) == 3
    for use_cache in (True, False):
        texts = Continuation(model, prompts, 12, GREEDY, [0, 0, 0], use_cache=use_cache)
        assert all_texts(texts, 3) == alone


def test_prompts_that_are_computed_in_portions_get_the_same_text(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [list(range(1, 18)), [3, 4], list(range(30, 42))]
    whole = all_texts(Continuation(model, prompts, 6, GREEDY, [0] * 3), 3)
    monkeypatch.setattr("trainer.generation._PREFILL_TOKENS", 12)
    assert all_texts(Continuation(model, prompts, 6, GREEDY, [0] * 3), 3) == whole


def test_a_text_that_its_reader_ends_gets_no_more_tokens(model: Transformer) -> None:
    texts = Continuation(model, [[1], [2]], 5, GREEDY, [0, 0])
    assert None not in texts.step()
    texts.end(0)
    assert [token is None for token in texts.step()] == [True, False]
    texts.end(1)
    assert texts.done
