"""Generation: the cache changes nothing, draws follow the limits, text streams in whole characters."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.initialize import initialize_parameters
from models.layers.cache import CacheFull
from models.llama.model import Transformer
from models.llama.sizes import LlamaSizes
from models.sizes import RopeScaling
from trainer.data.tokenizer import ByteTokenizer
from trainer.generation import Sampling, TextStream, draw, generate, probabilities

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
    assert list(generate(model, [1], 20, Sampling(1.0), stop=stop)) == text[: text.index(stop)]


def test_the_callers_gradient_mode_is_left_alone(model: Transformer) -> None:
    for _ in generate(model, [1], 2, GREEDY):
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()


def test_a_prompt_of_no_tokens_is_refused(model: Transformer) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        next(generate(model, [], 1, GREEDY))


def test_a_full_cache_is_refused(model: Transformer) -> None:
    cache = model.new_cache(1, 4)
    model(torch.zeros(1, 3, dtype=torch.long), cache=cache)
    with pytest.raises(CacheFull, match="5 tokens in a key-value cache made for 4"):
        model(torch.zeros(1, 2, dtype=torch.long), cache=cache)


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


@given(st.text(max_size=30))
def test_streamed_text_is_the_text_and_comes_in_whole_characters(text: str) -> None:
    tokenizer = ByteTokenizer()
    stream = TextStream(tokenizer)
    pieces = [stream.add(token) for token in tokenizer.encode(text, bos=True, eos=False)]
    expected = tokenizer.decode(tokenizer.encode(text, bos=True, eos=False))
    assert "".join(pieces) + stream.rest() == expected
    assert all(len(piece) <= 1 for piece in pieces) or "\N{REPLACEMENT CHARACTER}" in expected


def test_bytes_that_are_no_character_do_not_hold_the_text_back_for_ever() -> None:
    stream = TextStream(ByteTokenizer())
    pieces = [stream.add(0xFF) for _ in range(20)]
    assert "".join(pieces) + stream.rest() == "\N{REPLACEMENT CHARACTER}" * 20
    assert any(pieces)


def test_words_keep_their_blanks_where_a_decoder_drops_the_first() -> None:
    class Words:
        """Decodes like sentencepiece: a blank before each word, that of the first word dropped."""

        vocab_size, bos_id, eos_id = 3, None, None
        words = ("one", "two", "three")

        def encode(self, text: str, bos: bool, eos: bool) -> list[int]:
            return [self.words.index(word) for word in text.split()]

        def encode_batch(self, texts: list[str]) -> list[list[int]]:
            return [self.encode(text, False, False) for text in texts]

        def decode(self, ids: list[int]) -> str:
            return " ".join(self.words[i] for i in ids)

    stream = TextStream(Words())
    assert [stream.add(i) for i in (0, 1, 2)] == ["one", " two", " three"]
