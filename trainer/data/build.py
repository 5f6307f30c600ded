"""Loaders as the configuration asks for them: for training, and for each validation set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.data.loader import Loader, Share
from trainer.data.mixture import Member, Mixture, Packing
from trainer.data.sources import ChatSource, open_source
from trainer.data.stream import TokenStream
from trainer.data.tokenizer import Tokenizer
from trainer.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

    from trainer.config.schema import Config
    from trainer.config.tables.learning import DataSource, ValidationSet


@dataclass(frozen=True)
class ValidationData:
    """A validation set: its name, what loads it, and how many batches of each rank; None: all."""

    name: str
    loader: Loader
    batches: int | None


def training_sources(config: Config) -> tuple[DataSource, ...]:
    """What is trained on: `[[data.sources]]`, or the single data set of `[training]`."""
    from trainer.config.tables.learning import DataSource

    training = config.training
    alone = DataSource(
        name="data",
        dataset=training.dataset,
        dataset_path=training.dataset_path,
        text_column=training.text_column,
    )
    return config.data.sources or (alone,)


def validation_sets(config: Config) -> tuple[ValidationSet, ...]:
    """What is validated on: `[[validation.sets]]`, or the single data set of `[validation]`; unset keys are those of
    training."""
    from trainer.config.tables.learning import ValidationSet

    checked = config.validation
    if checked.sets:
        return checked.sets
    first = training_sources(config)[0]
    own = checked.dataset is not None or checked.dataset_path is not None
    alone = ValidationSet(
        name="validation",
        dataset=checked.dataset or first.dataset,
        dataset_path=checked.dataset_path if own else first.dataset_path,
        text_column=first.text_column,
    )
    return (alone,)


def build_loader(
    config: Config,
    tokenizer: Tokenizer,
    *,
    data_rank: int,
    data_ranks: int,
    device: torch.device | None = None,
) -> Loader:
    """The loader of a data-parallel rank for training; its batches are on `device`.

    Raises ConfigurationError if the data cannot be opened, or if global_batch_size is no multiple of batch_size times
    `data_ranks`.
    """
    training, data = config.training, config.data
    members = []
    for each in training_sources(config):
        stream = _stream(
            each,
            config,
            tokenizer,
            shuffle=data.shuffle,
            epochs=each.epochs or data.epochs,
            documents=each.limit_documents,
        )
        members.append(Member(each.name, stream, each.weight, each.limit_tokens))
    accumulation = accumulation_steps(training.global_batch_size, training.batch_size, data_ranks)
    return Loader(
        Mixture(members, _packing(config, training.seq_len), training.seed),
        Share(training.batch_size, data_rank, data_ranks, accumulation),
        mask_documents=data.mask_documents,
        workers=data.workers,
        device=device,
    )


def build_validation(
    config: Config,
    tokenizer: Tokenizer,
    *,
    data_rank: int,
    data_ranks: int,
    device: torch.device | None = None,
) -> list[ValidationData]:
    """The validation sets of a data-parallel rank: each read for one epoch, in order; batches are on `device`.

    Raises ConfigurationError if the data cannot be opened.
    """
    checked = config.validation
    share = Share(checked.batch_size or config.training.batch_size, data_rank, data_ranks)
    packing = _packing(config, checked.seq_len or config.training.seq_len)
    found = []
    for each in validation_sets(config):
        stream = _stream(each, config, tokenizer, epochs=1)
        loader = Loader(
            Mixture((Member(each.name, stream),), packing),
            share,
            mask_documents=config.data.mask_documents,
            device=device,
        )
        steps = checked.steps if each.steps is None else each.steps
        found.append(ValidationData(each.name, loader, None if steps == -1 else steps))
    return found


def accumulation_steps(global_batch_size: int | None, batch_size: int, data_ranks: int) -> int:
    """How many batches of each rank make a global batch; 1 if `global_batch_size` is unset."""
    if global_batch_size is None:
        return 1
    steps, rest = divmod(global_batch_size, batch_size * data_ranks)
    if rest or not steps:
        raise ConfigurationError(
            f"training.global_batch_size {global_batch_size} is not a multiple of {batch_size * data_ranks}: "
            f"training.batch_size {batch_size} on each of {data_ranks} data-parallel ranks"
        )
    return steps


def _stream(
    each: DataSource | ValidationSet,
    config: Config,
    tokenizer: Tokenizer,
    *,
    epochs: int | None,
    shuffle: bool = False,
    documents: int | None = None,
) -> TokenStream:
    data = config.data
    source = open_source(each.dataset, each.dataset_path, each.text_column)
    template = None
    if isinstance(source, ChatSource):
        from trainer.data.chat import ChatTemplate

        template = ChatTemplate(data.chat_template, tokenizer).segments
    return TokenStream(
        source,
        tokenizer,
        shuffle,
        config.training.seed,
        data.add_bos,
        data.add_eos,
        epochs,
        documents,
        data.shuffle_buffer,
        data.on_error,
        template,
    )


def _packing(config: Config, seq_len: int) -> Packing:
    return Packing(seq_len, config.data.packing, config.data.packing_lookahead)
