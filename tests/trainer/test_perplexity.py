"""The loss of a text: every token once, the trainer's loss where the trainer's windows are used."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.initialize import initialize_parameters
from models.llama.model import Transformer
from models.llama.sizes import LlamaSizes
from trainer.config.schema import Config
from trainer.data.build import build_validation
from trainer.data.tokenizer import ByteTokenizer
from trainer.errors import ConfigurationError
from trainer.inference import InferenceModel
from trainer.loss import counted_tokens, loss_of_microbatches
from trainer.perplexity import TextLoss, loss_of_text, windows
from trainer.scoring import Passage, score

TINY = LlamaSizes(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_hidden=48, vocab_size=258, max_seq_len=64)
TEXT = "".join(f"Line {i} of an uneven text, with {'é' * (i % 5)} and {i * i}.\n" for i in range(40))


@pytest.fixture(scope="module")
def loaded() -> InferenceModel:
    model = Transformer(TINY)
    initialize_parameters(model, 0)
    return InferenceModel(model.eval(), ByteTokenizer(), 64, ByteTokenizer.bos_id, frozenset())


def naive(model: Transformer, tokens: list[int], window: int, stride: int) -> float:
    """Minus the log-likelihood of every token but the first, each looked up on its own."""
    nats, begin = 0.0, 0
    for place in range(1, len(tokens)):
        if place - begin > window:
            begin += stride
        with torch.no_grad():
            logits = model(torch.tensor([tokens[begin:place]]))[0, -1]
        nats -= float(logits.double().log_softmax(-1)[tokens[place]])
    return nats


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 60), st.integers(1, 20), st.data())
def test_windows_score_every_token_but_the_first_once_and_see_no_more_than_they_may(
    length: int, window: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, window))
    scored = []
    for index, passage in enumerate(windows(range(length), window, stride)):
        assert 2 <= len(passage.tokens) <= window + 1
        assert passage.scored <= (window if index == 0 else stride)
        scored += passage.tokens[-passage.scored :]
        if index:
            assert len(passage.tokens) - passage.scored > min(window - stride, len(passage.tokens) - 2)
    assert scored == list(range(1, length))


@pytest.mark.parametrize(("window", "stride"), [(16, 16), (16, 5), (16, 1), (7, 3), (10_000, 10_000)])
def test_the_loss_of_a_text_is_that_of_its_tokens_looked_up_one_by_one(
    loaded: InferenceModel, window: int, stride: int
) -> None:
    text = TEXT[:150]
    tokens = list(text.encode())
    found = loss_of_text(loaded, text, window, stride, batch_size=3)
    assert (found.tokens, found.bytes) == (len(tokens), len(tokens))
    assert found.nats == pytest.approx(naive(loaded.model, [256, *tokens], window, stride), rel=1e-5)
    assert found.loss == found.nats / len(tokens)
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    assert found.bits_per_byte == pytest.approx(found.loss / math.log(2))  # a token is a byte


def test_with_windows_that_do_not_overlap_it_is_the_trainers_loss(
    loaded: InferenceModel, tmp_path: Path
) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    tables = {
        "training": {"dataset": "text", "dataset_path": str(file), "batch_size": 3, "seq_len": 16},
        "data": {"add_eos": False},
    }
    (held_out,) = build_validation(Config.model_validate(tables), ByteTokenizer(), data_rank=0, data_ranks=1)
    loader = held_out.loader
    nats, counted = 0.0, 0
    for batch in loader.from_start():
        loss = loss_of_microbatches([batch.labels], torch.ones(()))
        with torch.no_grad():
            nats += float(loss(loaded.model(batch.tokens), 0))
        counted += int(counted_tokens(batch.labels))
    found = loss_of_text(loaded, TEXT, 16, 16)
    assert found.tokens == counted
    assert found.loss == pytest.approx(nats / counted, rel=1e-6)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.integers(0, 257), min_size=2, max_size=12), min_size=1, max_size=6), st.data())
def test_the_score_of_a_passage_does_not_depend_on_those_beside_it(
    tokens: list[list[int]], data: st.DataObject
) -> None:
    model = Transformer(TINY)
    initialize_parameters(model, 0)
    passages = [Passage(each, data.draw(st.integers(1, len(each) - 1))) for each in tokens]
    size = data.draw(st.none() | st.integers(1, 4))
    together = score(model, passages, size)
    for passage, found in zip(passages, together, strict=True):
        (alone,) = score(model, [passage])
        assert found.log_likelihood == pytest.approx(alone.log_likelihood, rel=1e-5)
        assert found.greedy == alone.greedy


def test_a_passage_is_greedy_if_every_scored_token_is_the_most_likely(loaded: InferenceModel) -> None:
    tokens = [5, 6]
    for _ in range(3):
        with torch.no_grad():
            tokens.append(int(loaded.model(torch.tensor([tokens]))[0, -1].argmax()))
    wrong = [*tokens[:-1], (tokens[-1] + 1) % 258]
    found = score(loaded.model, [Passage(tokens, 3), Passage(tokens, 4), Passage(wrong, 3)])
    assert [each.greedy for each in found] == [True, False, False]


def test_a_text_without_tokens_is_refused(loaded: InferenceModel) -> None:
    with pytest.raises(ConfigurationError, match="no tokens"):
        loss_of_text(loaded, "", 8, 8)


def test_a_loss_beyond_all_numbers_has_an_infinite_perplexity() -> None:
    assert TextLoss(tokens=1, bytes=1, nats=800.0).perplexity == math.inf
