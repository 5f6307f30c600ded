"""A model to write text with or to evaluate: out of a run folder, a checkpoint, or a Hugging Face folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.registry import configured_sizes, family
from trainer.checkpoint.weights import TrainedModel, find_trained_model
from trainer.data.tokenizer import Tokenizer, load_tokenizer
from trainer.errors import ConfigurationError
from trainer.run_folder import RunFolder
from trainer.weights.folder import CONFIG_NAME, is_hugging_face_folder
from trainer.weights.tokenizer_files import GENERATION_CONFIG

if TYPE_CHECKING:
    import torch

    from models.layers.decoder import Decoder

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class InferenceModel:
    """A whole model on one device, and what is needed to give it text.

    Attributes:
        model: in evaluation mode.
        tokenizer: turns text into its tokens.
        longest: tokens of the longest sequences that it was trained on, or was made for.
        begins: the token that every text begins with, as those in training did; None: there is none.
        stop: tokens that end a text.
    """

    model: Decoder
    tokenizer: Tokenizer
    longest: int
    begins: int | None
    stop: frozenset[int]

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def before_text(self) -> int:
        """The token that stands before the first one of a text: what begins it, or what ended another."""
        usual = (self.begins, self.tokenizer.bos_id, self.tokenizer.eos_id)
        return next((token for token in usual if token is not None), 0)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, begun as those in training were."""
        return [
            *([] if self.begins is None else [self.begins]),
            *self.tokenizer.encode(text, bos=False, eos=False),
        ]

    def prompt(self, text: str) -> list[int]:
        """The same, at least one token."""
        return self.encode(text) or [self.before_text]


@dataclass(frozen=True)
class Found:
    """A model that is there, not loaded yet.

    Attributes:
        description: what it is, for people.
        passed_over: a sentence for each checkpoint that would have come first and is not valid.
    """

    description: str
    passed_over: tuple[str, ...]
    _at: TrainedModel | Path

    def load(self, dtype: str = "auto") -> InferenceModel:
        """Load it onto the accelerator, or the CPU where there is none.

        Args:
            dtype: number format of the parameters, one of `DTYPES`; "auto" is bfloat16 on an accelerator and
                float32 on a CPU.

        Raises:
            ConfigurationError: the weights are not those of the model, or there is no tokenizer.
        """
        import torch

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if dtype == "auto":
            dtype = "float32" if device.type == "cpu" else "bfloat16"
        number_format: torch.dtype = getattr(torch, dtype)
        if isinstance(self._at, Path):
            return _load_hugging_face(self._at, device, number_format)
        return _load_trained(self._at, device, number_format)


def find_model(path: Path) -> Found:
    """The model that a path means: a run folder or its checkpoint folder (the latest valid checkpoint), one of its
    step-N folders, or a Hugging Face folder.

    Raises ConfigurationError, with the path and the reason, if there is none.
    """
    if is_hugging_face_folder(path):
        return Found(f"the model of {path}", (), path)
    trained = find_trained_model(path)
    model = trained.config.model
    description = f"{model.name} {model.flavor} after {trained.step} steps, from {trained.step_folder}"
    return Found(description, trained.passed_over, trained)


def empty_model(name: str, sizes: Any, device: torch.device, dtype: torch.dtype) -> Decoder:
    """A whole model for inference whose parameters are of the given number format, their values arbitrary.

    Buffers keep their own number formats: what is counted or added up in them is lost in coarser ones.
    """
    import torch

    with torch.device("meta"):
        model = family(name).build(sizes)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.to_empty(device=device)
    for buffer in model.buffers():
        buffer.zero_()
    return model.eval().requires_grad_(False)


def _load_trained(trained: TrainedModel, device: torch.device, dtype: torch.dtype) -> InferenceModel:
    from trainer.checkpoint.manifest import InvalidCheckpoint
    from trainer.checkpoint.storage import CheckpointReader

    config = trained.config
    chosen = config.model
    # Without one in the configuration, the run has trained its own.
    tokenizer = load_tokenizer(chosen.tokenizer_path or RunFolder(trained.run_folder).tokenizer)
    sizes = configured_sizes(chosen.name, chosen.flavor, chosen.norm_type, chosen.override)
    model = empty_model(chosen.name, sizes, device, dtype)
    try:
        reader = CheckpointReader(trained.step_folder)
    except InvalidCheckpoint as error:
        raise ConfigurationError(f"{trained.step_folder} is not a valid checkpoint: {error}") from error
    reader.read_into("model", model.state_dict())
    stop = _stop_tokens(trained.run_folder, tokenizer)
    begins = tokenizer.bos_id if config.data.add_bos else None
    return InferenceModel(model, tokenizer, config.training.seq_len, begins, stop)


def _load_hugging_face(path: Path, device: torch.device, dtype: torch.dtype) -> InferenceModel:
    from trainer.weights.hugging_face import open_model
    from trainer.weights.naming import name_of

    opened = open_model(path)
    tokenizer = load_tokenizer(path)
    model = empty_model(name_of(opened.sizes).name, opened.sizes, device, dtype)
    opened.reader.read_into("model", model.state_dict())
    begins = tokenizer.bos_id if _begins_texts(path) else None
    return InferenceModel(model, tokenizer, opened.sizes.max_seq_len, begins, _stop_tokens(path, tokenizer))


def _stop_tokens(folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """The tokenizer's end token, and those that the files of a Hugging Face model name."""
    stop = set() if tokenizer.eos_id is None else {tokenizer.eos_id}
    for name in (GENERATION_CONFIG, CONFIG_NAME):
        named = _json(folder / name).get("eos_token_id")
        stop.update(each for each in (named if isinstance(named, list) else [named]) if isinstance(each, int))
    return frozenset(stop)


def _begins_texts(folder: Path) -> bool:
    """Whether the tokenizer of a Hugging Face folder puts the begin token before every text."""
    said = _json(folder / "tokenizer_config.json").get("add_bos_token")
    if isinstance(said, bool):
        return said
    if not (folder / "tokenizer.json").is_file():
        return True  # a sentencepiece model, as Llama 2 has
    from tokenizers import Tokenizer as File

    file = File.from_file(str(folder / "tokenizer.json"))
    return len(file.encode("", add_special_tokens=True).ids) > 0


def _json(file: Path) -> dict[str, Any]:
    """The table in a file; an empty one if the file is not there. Raises ConfigurationError for a broken one."""
    if not file.is_file():
        return {}
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{file} cannot be read: {error}") from error
    return table if isinstance(table, dict) else {}
