"""Packed sequences that say which document each token belongs to: in every layout, after a resume, to the end."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.corpora import ListSource, configuration, write_texts
from trainer.data.build import build_loader, build_validation
from trainer.data.errors import DataExhausted
from trainer.data.loader import IGNORE, Batch, Loader, Share
from trainer.data.mixture import Mixture
from trainer.data.stream import Position, TokenStream
from trainer.data.tokenizer import ByteTokenizer
from trainer.microbatches import cut_into_microbatches

TOKENIZER = ByteTokenizer()
BEGIN, END = TOKENIZER.bos_id, TOKENIZER.eos_id
SEQ_LEN, GLOBAL_BATCH = 7, 8

some_texts = st.lists(st.text("ab", min_size=1, max_size=20), min_size=2, max_size=12)
layouts = st.sampled_from([(1, 8), (1, 1), (2, 2), (4, 1)])


@dataclass(frozen=True)
class Row:
    """One sequence of a global batch."""

    tokens: list[int]
    labels: list[int]
    documents: list[int]


@dataclass(frozen=True)
class Job:
    """The loaders of all data-parallel ranks."""

    stream: TokenStream
    loaders: list[Loader]
    accumulation: int

    @classmethod
    def of(cls, texts: list[str], layout: tuple[int, int]) -> Job:
        ranks, batch_size = layout
        accumulation = GLOBAL_BATCH // (ranks * batch_size)
        stream = TokenStream(ListSource(texts), TOKENIZER, shuffle=True, epochs=2)
        shares = (Share(batch_size, rank, ranks, accumulation) for rank in range(ranks))
        loaders = [Loader(Mixture.of(stream, SEQ_LEN), share, mask_documents=True) for share in shares]
        return cls(stream, loaders, accumulation)

    def rows(self, most_steps: int) -> Iterator[Row]:
        """The sequences of the global batches that follow, in order."""
        try:
            for _ in range(most_steps * self.accumulation):
                for batch in [next(loader) for loader in self.loaders]:
                    yield from rows_of(batch)
        except DataExhausted:
            return


def rows_of(batch: Batch) -> list[Row]:
    assert batch.documents is not None
    parts = (part.tolist() for part in (batch.tokens, batch.labels, batch.documents))
    return [Row(*each) for each in zip(*parts, strict=True)]


@settings(max_examples=30, deadline=None)
@given(some_texts, layouts)
def test_documents_begin_at_begin_tokens_and_no_label_is_one(
    texts: list[str], layout: tuple[int, int]
) -> None:
    job = Job.of(texts, layout)
    rows = list(job.rows(10**6))
    for row in rows:
        assert row.documents[0] == 0
        neighbours = itertools.pairwise(zip(row.tokens, row.documents, row.labels, strict=True))
        for (token, document, label), (following, next_document, _) in neighbours:
            filled_up = token == following == END
            assert next_document - document == (
                following == BEGIN or (filled_up and next_document > document)
            )
            assert label == (IGNORE if following == BEGIN or filled_up else following)
    stream = [int(token) for piece in job.stream.pieces(Position()) for token in piece.tokens]
    labels = [label for row in rows for label in row.labels if label != IGNORE]
    assert labels == [token for token in stream if token != BEGIN]


@settings(max_examples=20, deadline=None)
@given(some_texts, layouts, layouts, st.integers(0, 4))
def test_documents_are_the_same_in_every_layout_and_after_a_resume(
    texts: list[str], first: tuple[int, int], second: tuple[int, int], steps: int
) -> None:
    straight = list(Job.of(texts, (1, 8)).rows(10**6))
    before, after = Job.of(texts, first), Job.of(texts, second)
    found = list(before.rows(steps))
    for loader in after.loaders:
        loader.load_state_dict(json.loads(json.dumps(before.loaders[0].state_dict())))
    found += after.rows(10**6)
    assert len(found) == len(straight)
    for row, expected in zip(found, straight, strict=True):
        assert row.labels == expected.labels
        if any(label != IGNORE for label in row.labels):  # else it is filled up, with nothing to learn from
            assert row == expected


def test_a_configuration_asks_for_documents_and_otherwise_there_are_none(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "corpus", ["abc", "de", "f" * 40])
    for validation in (False, True):
        for masked in (False, True):
            config = configuration(
                training={"dataset": "text", "dataset_path": str(folder), "seq_len": 8},
                data={"mask_documents": masked, "shuffle": False},
            )
            loader = build_loader(config, TOKENIZER, data_rank=0, data_ranks=1)
            if validation:
                loader = build_validation(config, TOKENIZER, data_rank=0, data_ranks=1)[0].loader
            batch = next(loader)
            loader.close()
            if masked:
                assert batch.documents is not None
                assert batch.documents.tolist() == [[0, 0, 0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 1]]
            else:
                assert batch.documents is None


def test_microbatches_are_the_batch_in_order_with_positions_that_begin_again_in_each_document() -> None:
    tokens = torch.arange(15).reshape(3, 5)
    documents = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 2, 2, 2], [0, 0, 0, 0, 0]])
    cut = cut_into_microbatches(Batch(tokens, tokens + 1, documents), (2, 1))
    assert torch.equal(torch.cat(cut.tokens), tokens)
    assert torch.equal(torch.cat(cut.labels), tokens + 1)
    assert [len(part) for part in cut.tokens] == [2, 1]
    assert cut.sequences is not None
    positions = [sequences.positions.tolist() for sequences in cut.sequences]
    assert positions == [[[0, 1, 0, 1, 2], [0, 0, 0, 1, 2]], [[0, 1, 2, 3, 4]]]
    assert [s.documents.tolist() for s in cut.sequences if s.documents is not None] == [
        documents[:2].tolist(),
        documents[2:].tolist(),
    ]
    assert cut_into_microbatches(Batch(tokens, tokens), (2, 1)).sequences is None
