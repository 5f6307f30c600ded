"""Tokenizers read from files: sentencepiece, Hugging Face `tokenizer.json`, tiktoken as Llama 3 uses it."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainer.data.tokenizer import fingerprint, with_ends
from trainer.errors import ConfigurationError


class SentencePieceTokenizer:
    """A sentencepiece model (unigram or BPE), as of Llama 2 or of `stageline prepare --train-tokenizer`."""

    def __init__(self, file: Path) -> None:
        """Raises ConfigurationError if `file` is no sentencepiece model."""
        from sentencepiece import SentencePieceProcessor

        try:
            self._model = SentencePieceProcessor(model_file=str(file))
        except (RuntimeError, OSError) as error:
            raise ConfigurationError(f"tokenizer {file}: not a sentencepiece model: {error}") from error
        self.file = file
        self.vocab_size: int = self._model.vocab_size()
        self.bos_id = _or_none(self._model.bos_id())
        self.eos_id = _or_none(self._model.eos_id())
        self.special_tokens = {
            self._model.id_to_piece(i): i for i in range(self.vocab_size) if self._model.is_control(i)
        }
        self.fingerprint = fingerprint(file, self.bos_id, self.eos_id)

    def encode(self, text: str, bos: bool, eos: bool) -> list[int]:
        return with_ends(self, self._model.encode(text), bos, eos)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        # One thread: the ranks of a node share its cores.
        encoded: list[list[int]] = self._model.encode(list(texts), num_threads=1)
        return encoded

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._model.decode([int(i) for i in ids])
        return text


def _or_none(token: int) -> int | None:
    return token if token >= 0 else None


class HuggingFaceTokenizer:
    """A `tokenizer.json` of the tokenizers library.

    The begin and end tokens are those that `tokenizer_config.json` beside it names, else the added tokens with
    a usual name. Truncation and padding that the file may ask for are switched off: they lose or add tokens.
    """

    _BEGIN = ("<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>", "[BOS]", "<|bos|>")
    _END = ("<|end_of_text|>", "</s>", "<eos>", "<|endoftext|>", "[EOS]", "<|eos|>")

    def __init__(self, file: Path) -> None:
        """Raises ConfigurationError if `file`, or the `tokenizer_config.json` beside it, is broken."""
        from tokenizers import Tokenizer

        try:
            self._model = Tokenizer.from_file(str(file))
        # The library raises a bare Exception for whatever is wrong with the file.
        except Exception as error:
            raise ConfigurationError(f"tokenizer {file}: not a tokenizer.json: {error}") from error
        self._model.no_truncation()
        self._model.no_padding()
        self._model.encode_special_tokens = True
        self.vocab_size: int = max(self._model.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if self.vocab_size == 0:
            raise ConfigurationError(f"tokenizer {file}: its vocabulary is empty")
        names = _special_names(file.parent / "tokenizer_config.json")
        self.bos_id = self._special(names.get("bos_token"), self._BEGIN)
        self.eos_id = self._special(names.get("eos_token"), self._END)
        added = self._model.get_added_tokens_decoder()
        self.special_tokens = {token.content: i for i, token in added.items() if token.special}
        self.file = file
        self.fingerprint = fingerprint(file, self.bos_id, self.eos_id)

    def _special(self, named: str | None, usual: tuple[str, ...]) -> int | None:
        if named is not None:
            token: int | None = self._model.token_to_id(named)
            return token
        added = {token.content: i for i, token in self._model.get_added_tokens_decoder().items()}
        return next((added[name] for name in usual if name in added), None)

    def encode(self, text: str, bos: bool, eos: bool) -> list[int]:
        return with_ends(self, self._model.encode(text, add_special_tokens=False).ids, bos, eos)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in self._model.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._model.decode([int(i) for i in ids], skip_special_tokens=True)
        return text


def _special_names(file: Path) -> dict[str, str]:
    """`bos_token` and `eos_token` as `file` names them; it may write a token as a string or as a table."""
    if not file.is_file():
        return {}
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"tokenizer {file}: cannot be read: {error}") from error
    tokens = {key: config.get(key) for key in ("bos_token", "eos_token")}
    named = {key: token.get("content") if isinstance(token, dict) else token for key, token in tokens.items()}
    return {key: name for key, name in named.items() if isinstance(name, str)}


class TiktokenTokenizer:
    """The tiktoken ranks of Llama 3, with its split pattern and its 256 special tokens after the ranks.

    Source: `llama/tokenizer.py` of meta-llama/llama3. As there, a text is encoded in pieces of at most 400,000
    characters with at most 25,000 spaces, or others than spaces, in a row: longer ones exhaust the stack of the
    library's regular expressions.
    """

    PATTERN = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    SPECIAL = (
        "<|begin_of_text|>",
        "<|end_of_text|>",
        *(f"<|reserved_special_token_{i}|>" for i in range(4)),
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|reserved_special_token_4|>",
        "<|eot_id|>",
        *(f"<|reserved_special_token_{i}|>" for i in range(5, 251)),
    )
    LONGEST_PIECE = 400_000
    LONGEST_RUN = 25_000

    def __init__(self, file: Path) -> None:
        """Raises ConfigurationError, with the line, if `file` is not lines of a base64 token and its rank."""
        import tiktoken

        self.ranks = ranks = _read_ranks(file)
        self.special_tokens = special = {name: len(ranks) + i for i, name in enumerate(self.SPECIAL)}
        self._model = tiktoken.Encoding(
            name=file.name, pat_str=self.PATTERN, mergeable_ranks=ranks, special_tokens=special
        )
        self._first_special = len(ranks)
        self.vocab_size = len(ranks) + len(special)
        self.bos_id = special["<|begin_of_text|>"]
        self.eos_id = special["<|end_of_text|>"]
        self.file = file
        self.fingerprint = fingerprint(file, self.bos_id, self.eos_id)

    def encode(self, text: str, bos: bool, eos: bool) -> list[int]:
        return with_ends(self, self._ids(text), bos, eos)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._ids(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(i) for i in ids if i < self._first_special], errors="replace")

    def _ids(self, text: str) -> list[int]:
        pieces = _short_pieces(text, self.LONGEST_PIECE, self.LONGEST_RUN)
        return [token for piece in pieces for token in self._model.encode_ordinary(piece)]


def _read_ranks(file: Path) -> dict[bytes, int]:
    """The ranks by token: 0 to n - 1, each once, with a token for each single byte."""
    ranks: dict[bytes, int] = {}
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise ConfigurationError(f"tokenizer {file}: cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ConfigurationError(
                f"tokenizer {file}, line {number}: expected a base64 token, a space and its rank"
            ) from error
    if set(ranks.values()) != set(range(len(ranks))):
        raise ConfigurationError(f"tokenizer {file}: the ranks are not 0 to {len(ranks) - 1}, each once")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ConfigurationError(
            f"tokenizer {file}: no token for {len(missing)} of the 256 single bytes; is the file cut off?"
        )
    return ranks


def _short_pieces(text: str, longest: int, longest_run: int) -> Iterator[str]:
    too_long = re.compile(rf"\s{{{longest_run + 1},}}|\S{{{longest_run + 1},}}")
    for start in range(0, len(text), longest):
        piece = text[start : start + longest]
        begin = 0
        for run in too_long.finditer(piece):
            for cut in range(run.start() + longest_run, run.end(), longest_run):
                yield piece[begin:cut]
                begin = cut
        yield piece[begin:]
