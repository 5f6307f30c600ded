"""Text of tokens that come one at a time."""

from __future__ import annotations

from trainer.data.tokenizer import Tokenizer


class TextStream:
    """Text of tokens that come one at a time.

    A token need not be whole characters, and its text may depend on the one before it (a leading blank, for
    instance), so the last tokens are decoded again with each new one and the difference is given out. A
    character that is not complete yet is held back.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []  # tokens whose text has been given out; needed before the next ones
        self._held: list[int] = []

    def add(self, token: int) -> str:
        """The text that this token completes; may be empty."""
        self._held.append(token)
        text = self._text()
        if text.endswith("\N{REPLACEMENT CHARACTER}") and len(self._held) < 8:
            return ""  # most likely the first bytes of a character; none has more than 4
        self._context, self._held = self._held, []
        return text

    def rest(self) -> str:
        """The text of what is still held back."""
        text, self._held = self._text(), []
        return text

    def _text(self) -> str:
        given_out = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._held)[len(given_out) :]
