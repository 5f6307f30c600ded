"""Text streams in whole characters."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainer.data.tokenizer import ByteTokenizer
from trainer.text_stream import TextStream


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
