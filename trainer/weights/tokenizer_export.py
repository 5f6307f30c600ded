"""The tokenizer of a run as files that `transformers.AutoTokenizer` loads, giving the same ids.

- `tokenizer.json` goes as it is, with what lies beside it.
- A sentencepiece model goes as it is, with a `tokenizer_config.json` that says how it treats the first blank.
- Tiktoken's ranks and the bytes become a `tokenizer.json`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.checkpoint.weights import TrainedModel
from trainer.data.tokenizer import BYTE, ByteTokenizer, Tokenizer, load_tokenizer
from trainer.errors import ConfigurationError
from trainer.run_folder import RunFolder
from trainer.weights.tokenizer_files import GENERATION_CONFIG, TOKENIZER_FILES

if TYPE_CHECKING:
    import tokenizers

_CONFIG = "tokenizer_config.json"

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = tuple(byte for byte in range(256) if byte not in _PRINTABLE)
# Printable characters of Latin-1 stand for themselves, the other bytes for characters from U+0100 on, in order.
_CHARACTERS = tuple(chr(byte if byte in _PRINTABLE else 0x100 + _OTHERS.index(byte)) for byte in range(256))


def export_tokenizer(
    trained: TrainedModel, folder: Path, say: Callable[[str], None]
) -> dict[str, int | None]:
    """Write the files of a run's tokenizer; what `config.json` says of it: the ids of its begin and end tokens.

    Without a tokenizer nothing is written but a sentence said: a model can do without, its user may not.
    """
    generation = trained.run_folder / GENERATION_CONFIG
    if generation.is_file():
        shutil.copyfile(generation, folder / GENERATION_CONFIG)
    path = trained.config.model.tokenizer_path or RunFolder(trained.run_folder).tokenizer
    try:
        tokenizer = load_tokenizer(path)
    except ConfigurationError as error:
        say(f"no tokenizer is exported: {error}")
        return {}
    _write(Path(path), tokenizer, trained.config.data.add_bos, folder, say)
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}


def _write(path: Path, tokenizer: Tokenizer, add_bos: bool, folder: Path, say: Callable[[str], None]) -> None:
    from trainer.data.tokenizer_formats import SentencePieceTokenizer, TiktokenTokenizer

    if str(path) != BYTE:
        _copy_companions(path if path.is_dir() else path.parent, folder)
    match tokenizer:
        case ByteTokenizer():
            names = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
            _save(_from_bytes(names), names, tokenizer, add_bos, folder)
        case TiktokenTokenizer():
            names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
            _save(_from_ranks(tokenizer), names, tokenizer, add_bos, folder)
        case SentencePieceTokenizer():
            shutil.copyfile(tokenizer.file, folder / "tokenizer.model")
            if not (folder / _CONFIG).is_file():
                _write_json(folder / _CONFIG, _sentencepiece_config(tokenizer, add_bos, say))
        case _:
            if not (folder / "tokenizer.json").is_file():  # under another name
                shutil.copyfile(path, folder / "tokenizer.json")
            if not (folder / _CONFIG).is_file():
                _write_json(folder / _CONFIG, {"tokenizer_class": "PreTrainedTokenizerFast"})


def _copy_companions(source: Path, folder: Path) -> None:
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _sentencepiece_config(tokenizer: Any, add_bos: bool, say: Callable[[str], None]) -> dict[str, Any]:
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # made when imported
    model.ParseFromString(tokenizer.file.read_bytes())
    if model.trainer_spec.model_type != model.trainer_spec.BPE or not model.trainer_spec.byte_fallback:
        say(f"{tokenizer.file}: transformers reads it as byte-pair encoding with bytes, which it is not")
    pieces = [piece.piece for piece in model.pieces]
    special = {
        "bos_token": tokenizer.bos_id,
        "eos_token": tokenizer.eos_id,
        "unk_token": model.trainer_spec.unk_id,
    }
    return {
        "tokenizer_class": "LlamaTokenizer",
        **{key: pieces[number] for key, number in special.items() if number is not None and number >= 0},
        "add_prefix_space": model.normalizer_spec.add_dummy_prefix,
        "add_bos_token": add_bos and tokenizer.bos_id is not None,
        "add_eos_token": False,
        "legacy": False,
        "clean_up_tokenization_spaces": False,
    }


def _save(
    made: tokenizers.Tokenizer, names: Mapping[str, str], tokenizer: Tokenizer, add_bos: bool, folder: Path
) -> None:
    from tokenizers.processors import TemplateProcessing

    if add_bos and tokenizer.bos_id is not None:
        begin = names["bos_token"]
        made.post_processor = TemplateProcessing(
            single=f"{begin} $A",
            pair=f"{begin} $A {begin}:1 $B:1",
            special_tokens=[(begin, tokenizer.bos_id)],
        )
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names, "clean_up_tokenization_spaces": False}
    _write_json(folder / _CONFIG, config)


def _from_bytes(names: Mapping[str, str]) -> tokenizers.Tokenizer:
    """The 256 bytes as tokens, without merges, and the begin and end token after them."""
    return _byte_level({_shown(bytes([byte])): byte for byte in range(256)}, [], None, list(names.values()))


def _from_ranks(tokenizer: Any) -> tokenizers.Tokenizer:
    """Tiktoken's ranks as vocabulary and merges.

    A token came from the merge of two others; of all ways to cut it in two, each is a merge of its rank, as
    `transformers.convert_slow_tokenizer.TikTokenConverter` has it.
    """
    ranks: dict[bytes, int] = tokenizer.ranks
    merges = [
        (rank, ranks[token[:cut]], ranks[token[cut:]], token[:cut], token[cut:])
        for token, rank in ranks.items()
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    merges.sort(key=lambda merge: merge[:3])
    vocabulary = {_shown(token): rank for token, rank in ranks.items()}
    pairs = [(_shown(left), _shown(right)) for *_, left, right in merges]
    return _byte_level(vocabulary, pairs, tokenizer.PATTERN, list(tokenizer.SPECIAL))


def _byte_level(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], pattern: str | None, special: list[str]
) -> tokenizers.Tokenizer:
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Made

    made = Made(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False, ignore_merges=bool(merges)))
    bytes_to_characters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    cut = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), behavior="isolated")]
    made.pre_tokenizer = pre_tokenizers.Sequence([*cut, bytes_to_characters])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in special])
    return made


def _shown(token: bytes) -> str:
    """Bytes as the characters by which byte-level vocabularies write them (Radford et al. 2019, GPT-2)."""
    return "".join(_CHARACTERS[byte] for byte in token)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
