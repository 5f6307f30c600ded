"""Text to token ids and back: one protocol, and how a tokenizer is found.

The format of a file is told from its content: Llama 2 (sentencepiece) and Llama 3 (tiktoken) both name
theirs `tokenizer.model`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from trainer.data.tokenizer_training import debug_tokenizer, train_sentencepiece
from trainer.errors import ConfigurationError

__all__ = ["ByteTokenizer", "Tokenizer", "debug_tokenizer", "load_tokenizer", "train_sentencepiece"]

BYTE = "byte"
"""The name, in place of a path, of the tokenizer that needs no file."""

_NAMES_IN_FOLDER = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "original/tokenizer.model")
_RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")


class Tokenizer(Protocol):
    """What training and generation need of a tokenizer. Names of special tokens in a text are plain text."""

    @property
    def fingerprint(self) -> str:
        """Of the file's content and the begin and end tokens: equal where a text's ids are equal."""

    @property
    def file(self) -> Path | str:
        """What `load_tokenizer` made it of."""

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """The ids of the tokens that no text gives, by name: what chat templates are made of."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def bos_id(self) -> int | None:
        """The token that begins a document; None where the vocabulary has none."""

    @property
    def eos_id(self) -> int | None:
        """The token that ends a document; None where the vocabulary has none."""

    def encode(self, text: str, bos: bool, eos: bool) -> list[int]:
        """The ids of `text`, after the begin token if `bos`, before the end token if `eos` (if they exist)."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without begin and end tokens; quicker than one at a time."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids; begin and end tokens give nothing."""


def fingerprint(file: Path, bos_id: int | None, eos_id: int | None) -> str:
    """Of a tokenizer file and the tokens that begin and end a document."""
    digest = hashlib.sha256(file.read_bytes())
    digest.update(f"{bos_id} {eos_id}".encode())
    return digest.hexdigest()[:16]


def with_ends(tokenizer: Tokenizer, ids: list[int], bos: bool, eos: bool) -> list[int]:
    """`ids` between the begin and end tokens that are asked for and that the vocabulary has."""
    begin = [tokenizer.bos_id] if bos and tokenizer.bos_id is not None else []
    end = [tokenizer.eos_id] if eos and tokenizer.eos_id is not None else []
    return begin + ids + end


class ByteTokenizer:
    """The 256 bytes of UTF-8, and a begin (256) and an end (257) token."""

    fingerprint = BYTE
    file = BYTE
    special_tokens: Mapping[str, int] = MappingProxyType({})
    vocab_size = 258
    bos_id = 256
    eos_id = 257

    def encode(self, text: str, bos: bool, eos: bool) -> list[int]:
        return with_ends(self, list(text.encode("utf-8", errors="replace")), bos, eos)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode("utf-8", errors="replace")) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer named "byte", or that of a file or of a folder that holds one.

    Files: sentencepiece `.model`, Hugging Face `tokenizer.json`, tiktoken rank lines as Llama 3 ships them.
    Raises ConfigurationError, with the path, for a file that is missing, of no known format, or broken.
    """
    if str(path) == BYTE:
        return ByteTokenizer()
    file = _find(Path(path).expanduser())
    # These modules load their library; a byte tokenizer needs none.
    from trainer.data.tokenizer_formats import (
        HuggingFaceTokenizer,
        SentencePieceTokenizer,
        TiktokenTokenizer,
    )

    match _format(file):
        case _Format.SENTENCEPIECE:
            return SentencePieceTokenizer(file)
        case _Format.HUGGING_FACE:
            return HuggingFaceTokenizer(file)
        case _Format.TIKTOKEN:
            return TiktokenTokenizer(file)


def tokenizer_files(path: str | Path) -> list[Path]:
    """The files that `load_tokenizer` reads for that path."""
    file = _find(Path(path).expanduser())
    beside = file.parent / "tokenizer_config.json"
    return [file, beside] if file.suffix == ".json" and beside.is_file() else [file]


class _Format(Enum):
    SENTENCEPIECE = "sentencepiece"
    HUGGING_FACE = "Hugging Face"
    TIKTOKEN = "tiktoken"


def _find(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise ConfigurationError(f"tokenizer {path}: no such file or folder")
    for name in _NAMES_IN_FOLDER:
        if (path / name).is_file():
            return path / name
    models = sorted(path.glob("*.model"))
    if len(models) == 1:
        return models[0]
    held = f"several models ({', '.join(m.name for m in models)}); name one" if models else "no tokenizer"
    raise ConfigurationError(
        f"tokenizer {path}: the folder holds {held}; looked for {', '.join(_NAMES_IN_FOLDER)} and *.model"
    )


def _format(file: Path) -> _Format:
    try:
        with file.open("rb") as stream:
            head = stream.read(4096)
    except OSError as error:
        raise ConfigurationError(f"tokenizer {file}: cannot be read: {error.strerror}") from error
    if _RANK_LINE.match(head):
        return _Format.TIKTOKEN
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
        return _Format.HUGGING_FACE
    if head.startswith(b"\x0a"):  # a protocol buffer whose first field holds the first piece
        return _Format.SENTENCEPIECE
    raise ConfigurationError(
        f"tokenizer {file}: of no known format; expected a sentencepiece model, a Hugging Face tokenizer.json, "
        "or tiktoken lines (base64 token, space, rank)"
    )
