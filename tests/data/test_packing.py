"""Documents to tokens to windows: nothing lost, nothing repeated, a position that begins the stream anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.corpora import ListSource, ListStream
from trainer.data.encoding import ENCODED_AHEAD
from trainer.data.packing import Row, best_fit, cut
from trainer.data.stream import Position, TokenStream
from trainer.data.tokenizer import ByteTokenizer
from trainer.errors import ConfigurationError

TOKENIZER = ByteTokenizer()

texts = st.lists(st.text("abc", max_size=12), min_size=1, max_size=8).filter(any)


def stream(source: list[str], **settings: object) -> TokenStream:
    return TokenStream(ListSource(source), TOKENIZER, **{"epochs": 1, **settings})  # type: ignore[arg-type]


def tokens_of(flow: TokenStream, start: Position | None = None) -> list[int]:
    return [int(token) for piece in flow.pieces(start or Position()) for token in piece.tokens]


def test_documents_lie_between_begin_and_end_tokens() -> None:
    assert tokens_of(stream(["a", "bc"])) == [256, 97, 257, 256, 98, 99, 257]
    assert tokens_of(stream(["a", "bc"], add_bos=False)) == [97, 257, 98, 99, 257]
    assert tokens_of(stream(["a", "bc"], add_eos=False)) == [256, 97, 256, 98, 99]


def test_documents_without_text_give_no_token() -> None:
    assert tokens_of(stream(["", "a", "", ""])) == [256, 97, 257]


@pytest.mark.parametrize("source", [ListSource(["", "", ""]), ListStream(["", ""]), ListStream([])])
@pytest.mark.parametrize("epochs", [None, 3])
def test_data_without_any_token_is_refused_instead_of_read_for_ever(
    source: ListSource | ListStream, epochs: int | None
) -> None:
    with pytest.raises(ConfigurationError, match=rf"{source.name}: none of the documents holds text"):
        next(TokenStream(source, TOKENIZER, epochs=epochs).pieces(Position()))


def test_epochs_follow_each_other_in_orders_of_their_own() -> None:
    source = [chr(97 + i) for i in range(20)]
    flow = stream(source, epochs=2, shuffle=True, add_bos=False, add_eos=False)
    found = "".join(map(chr, tokens_of(flow)))
    first, second = found[:20], found[20:]
    assert sorted(first) == sorted(second) == source
    assert len({first, second, "".join(source)}) == 3
    other_seed = stream(source, shuffle=True, seed=1, add_bos=False, add_eos=False)
    assert "".join(map(chr, tokens_of(other_seed))) != first


@settings(deadline=None)
@given(source=texts, epochs=st.integers(1, 3), shuffle=st.booleans(), streaming=st.booleans(), data=st.data())
def test_the_stream_begins_at_any_position_where_it_would_have_gone_on(
    source: list[str], epochs: int, shuffle: bool, streaming: bool, data: st.DataObject
) -> None:
    documents = ListStream(source) if streaming else ListSource(source)
    flow = TokenStream(documents, TOKENIZER, shuffle=shuffle, epochs=epochs)
    pieces = list(flow.pieces(Position()))
    whole = [int(token) for piece in pieces for token in piece.tokens]
    at = data.draw(st.integers(0, len(whole) - 1))
    left = at
    for piece in pieces:
        if left < len(piece.tokens):
            start = piece.drop(left).start
            break
        left -= len(piece.tokens)
    assert tokens_of(flow, start) == whole[at:]


def filled(row: Row, length: int, joined: bool = True) -> tuple[list[int], list[int], list[int]]:
    """Inputs, labels and documents; -1 for what is not set."""
    arrays = [np.full(length, -1, dtype=np.int64) for _ in range(3)]
    row.fill(*arrays, joined=joined)
    inputs, labels, documents = (array.tolist() for array in arrays)
    return inputs, labels, documents


@settings(deadline=None)
@given(source=texts, length=st.integers(1, 30), epochs=st.integers(1, 3))
def test_cut_sequences_overlap_by_one_token_and_together_are_the_stream(
    source: list[str], length: int, epochs: int
) -> None:
    flow = stream(source, epochs=epochs)
    whole = tokens_of(flow)
    rows = list(cut(flow.pieces(Position()), length))
    contents = [filled(row, length) for row in rows]
    labels = [label for _, found, _ in contents for label in found if label != -1]
    inputs = [token for found, _, _ in contents for token in found if token != -1]
    assert labels == whole[1:]
    assert inputs[: len(whole) - 1] == whole[:-1]
    assert all(row.inputs == length for row in rows[:-1])
    assert all(row.after is not None for row in rows[:-1])


@settings(deadline=None)
@given(
    source=texts,
    length=st.integers(1, 30),
    skipped=st.integers(0, 9),
    lookahead=st.one_of(st.none(), st.integers(1, 9)),
)
def test_a_sequence_says_where_the_next_one_begins(
    source: list[str], length: int, skipped: int, lookahead: int | None
) -> None:
    """Case D5: documents that wait to be packed are not lost."""
    flow = stream(source, epochs=None, shuffle=True)

    def rows(start: Position) -> Iterator[Row]:
        pieces = flow.pieces(replace(start, row=0))
        return cut(pieces, length) if lookahead is None else best_fit(pieces, start, length, lookahead)

    straight = list(islice(rows(Position()), skipped + 3))
    after = straight[skipped].after
    assert after is not None
    for expected, found in zip(straight[skipped + 1 :], islice(rows(after), 2), strict=True):
        assert filled(expected, length) == filled(found, length)
        assert expected.after == found.after


@settings(deadline=None)
@given(source=texts, length=st.integers(2, 30), epochs=st.integers(1, 3), lookahead=st.integers(1, 9))
def test_best_fit_gives_every_token_once_and_cuts_only_documents_that_do_not_fit(
    source: list[str], length: int, epochs: int, lookahead: int
) -> None:
    flow = stream(source, epochs=epochs)
    documents = [piece.tokens.tolist() for piece in flow.pieces(Position())]
    rows = list(best_fit(flow.pieces(Position()), Position(), length, lookahead))
    assert all(row.inputs <= length for row in rows)
    labels = [label for row in rows for label in filled(row, length, joined=False)[1] if label != -1]
    assert sorted(labels) == sorted(token for document in documents for token in document[1:])
    parts = [part for row in rows for part in row.parts]
    whole = sorted(tuple(part.piece.tokens.tolist()) for part in parts if part.piece.start.offset == 0)
    assert whole == sorted(map(tuple, documents))
    assert all(part.inputs == len(part.piece.tokens) for part in parts if len(part.piece.tokens) <= length)


def test_best_fit_fills_sequences_better_than_documents_in_their_order() -> None:
    source = ["x" * (5 + i * 37 % 90) for i in range(300)]
    flow = stream(source)
    rows = list(best_fit(flow.pieces(Position()), Position(), 100, 32))
    held = sum(row.inputs for row in rows)
    assert held == len(tokens_of(flow))
    assert held / (100 * len(rows)) > 0.96


def test_resuming_encodes_no_document_before_the_position() -> None:
    source = ListSource(["x" * ENCODED_AHEAD] * 10)
    flow = TokenStream(source, TOKENIZER)
    next(flow.pieces(Position(epoch=3, document=7, offset=100)))
    assert source.reads == [7]
    streaming = ListStream(["x" * 10] * 10)
    next(TokenStream(streaming, TOKENIZER).pieces(Position(epoch=3, document=7, offset=5)))
    assert streaming.starts == [7]


def test_a_position_past_the_end_of_its_document_or_epoch_means_what_follows() -> None:
    flow = stream(["a", "b"], epochs=2)
    assert tokens_of(flow, Position(0, 0, 99)) == tokens_of(flow, Position(0, 1, 0))
    assert tokens_of(flow, Position(0, 99, 0)) == tokens_of(flow, Position(1, 0, 0))
    assert tokens_of(flow, flow.end) == []
