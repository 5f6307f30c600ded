"""The loader: step k holds the same tokens for every number of ranks, after every resume, to the last token."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.corpora import ListSource, ListStream, configuration, write_texts
from trainer.data.build import accumulation_steps, build_loader, build_validation
from trainer.data.errors import DataExhausted, SourceFailed
from trainer.data.loader import IGNORE, Batch, Loader, Share
from trainer.data.mixture import Mixture
from trainer.data.sources import Source, StreamingSource
from trainer.data.stream import Position, TokenStream
from trainer.data.tokenizer import ByteTokenizer
from trainer.errors import ConfigurationError

TOKENIZER = ByteTokenizer()
TEXTS = [f"{i} " * (1 + i * 7 % 11) for i in range(9)] + ["", "x"]

Step = list[tuple[list[int], list[int]]]
"""The sequences of a global batch in order: inputs and labels."""


class Job:
    """The loaders of all data-parallel ranks, driven as a trainer drives them."""

    def __init__(
        self,
        source: Source,
        *,
        data_ranks: int = 1,
        global_batch: int = 8,
        batch_size: int = 1,
        seq_len: int = 5,
        **settings: Any,
    ) -> None:
        self.accumulation = accumulation_steps(global_batch, batch_size, data_ranks)
        self.stream = TokenStream(source, TOKENIZER, **{"shuffle": True, **settings})
        self.loaders = [
            Loader(Mixture.of(self.stream, seq_len), Share(batch_size, rank, data_ranks, self.accumulation))
            for rank in range(data_ranks)
        ]

    def step(self) -> Step:
        """One global batch. Raises DataExhausted, having seen that all ranks do."""
        sequences: Step = []
        for number in range(self.accumulation):
            batches: list[Batch] = []
            ended = 0
            for loader in self.loaders:
                try:
                    batches.append(next(loader))
                except DataExhausted as error:
                    ended += 1
                    last = error
            if ended:
                assert (ended, number) == (len(self.loaders), 0), (
                    "some ranks ended, or in the middle of a step"
                )
                raise last
            for batch in batches:
                sequences += zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True)
        return sequences

    def steps(self, most: int) -> list[Step]:
        return list(islice(self._steps(), most))

    def _steps(self) -> Iterator[Step]:
        while True:
            try:
                yield self.step()
            except DataExhausted:
                return

    def state(self) -> dict[str, Any]:
        """The state, the same on all ranks, after a way through JSON."""
        states = [loader.state_dict() for loader in self.loaders]
        assert all(state == states[0] for state in states)
        restored: dict[str, Any] = json.loads(json.dumps(states[0]))
        return restored

    def load(self, state: dict[str, Any]) -> Job:
        for loader in self.loaders:
            loader.load_state_dict(state)
        assert self.state()["sources"] == state["sources"]
        return self


def counted(steps: list[Step]) -> list[int]:
    """The labels that count, in order."""
    return [label for step in steps for _, labels in step for label in labels if label != IGNORE]


def whole_stream(job: Job) -> list[int]:
    return [int(token) for piece in job.stream.pieces(Position()) for token in piece.tokens]


sources = st.sampled_from([ListSource, ListStream])


@settings(max_examples=30, deadline=None)
@given(
    kind=sources,
    shuffle=st.booleans(),
    texts=st.lists(st.text("ab", max_size=30), min_size=1, max_size=10).filter(any),
    layouts=st.lists(
        st.sampled_from([(1, 8), (1, 1), (2, 2), (2, 4), (4, 1), (4, 2)]), min_size=3, max_size=3
    ),
    cuts=st.tuples(st.integers(0, 6), st.integers(0, 6)),
    epochs=st.sampled_from([None, 1, 2, 3]),
)
def test_the_stream_is_the_same_straight_and_resumed_twice_on_other_degrees(
    kind: type, shuffle: bool, texts: list[str], layouts: Any, cuts: tuple[int, int], epochs: int | None
) -> None:
    """Cases D2 (4 ranks, then 2), D5 (tokens in the packing buffer lost) and D7 (starts over at the second resume)."""

    def job(layout: tuple[int, int]) -> Job:
        ranks, batch_size = layout
        return Job(kind(texts), data_ranks=ranks, batch_size=batch_size, shuffle=shuffle, epochs=epochs)

    straight = job((1, 8)).steps(18)
    first = job(layouts[0])
    found = first.steps(cuts[0])
    second = job(layouts[1]).load(first.state())
    found += second.steps(cuts[1])
    third = job(layouts[2]).load(second.state())
    found += third.steps(18 - len(found))
    assert found == straight


@settings(max_examples=30, deadline=None)
@given(
    texts=st.lists(st.text("ab", max_size=30), min_size=1, max_size=10).filter(any),
    ranks=st.sampled_from([1, 2, 4]),
    epochs=st.integers(1, 3),
    seq_len=st.integers(1, 20),
)
def test_every_token_of_every_epoch_is_a_label_exactly_once(
    texts: list[str], ranks: int, epochs: int, seq_len: int
) -> None:
    job = Job(ListSource(texts), data_ranks=ranks, epochs=epochs, seq_len=seq_len)
    steps = job.steps(10**6)
    stream = whole_stream(job)
    assert counted(steps) == stream[1:]
    inputs = [token for step in steps for tokens, _ in step for token in tokens]
    assert inputs[: len(stream) - 1] == stream[:-1]


def test_labels_are_the_next_tokens() -> None:
    job = Job(ListSource(TEXTS))
    for tokens, labels in job.step():
        assert labels[:-1] == tokens[1:]


def test_batches_are_int64_of_batch_size_by_sequence_length() -> None:
    batch = next(Job(ListSource(TEXTS), batch_size=4).loaders[0])
    assert (batch.tokens.shape, batch.labels.shape) == ((4, 5), (4, 5))
    assert (str(batch.tokens.dtype), str(batch.labels.dtype)) == ("torch.int64", "torch.int64")


def test_the_state_right_after_loading_is_the_state_that_was_loaded() -> None:
    """Case D3: an epoch is lost."""
    job = Job(ListSource(TEXTS), data_ranks=2)
    job.steps(5)
    state = job.state()
    again = Job(ListSource(TEXTS), data_ranks=2).load(state)
    assert Job(ListSource(TEXTS)).load(again.state()).steps(4) == job.steps(4)


def test_the_state_is_that_of_the_batches_taken_not_of_those_made_ahead() -> None:
    job = Job(ListSource(TEXTS))
    assert job.state()["sources"]["data"]["document"] == 0
    states = []
    for _ in range(6):
        states.append(job.state())
        job.step()
    rest = job.steps(1)
    assert Job(ListSource(TEXTS)).load(states[5]).steps(2)[1:] == rest
    assert len({json.dumps(state) for state in states}) == 6


def test_the_state_is_small() -> None:
    assert len(json.dumps(Job(ListSource(TEXTS)).state())) < 600


def test_loading_goes_back_as_well_as_forward() -> None:
    job = Job(ListSource(TEXTS))
    start = job.state()
    first = job.steps(3)
    job.load(start)
    assert job.steps(3) == first


def test_changing_the_batch_size_on_resume_neither_loses_nor_repeats_tokens() -> None:
    """Case D4: skipping is repeated, or wrong after the batch size changed."""
    job = Job(ListSource(TEXTS), epochs=2)
    steps = job.steps(3)
    other = Job(ListSource(TEXTS), epochs=2, global_batch=6, batch_size=3, data_ranks=2, seq_len=7)
    steps += other.load(job.state()).steps(10**6)
    assert counted(steps) == whole_stream(job)[1:]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_ranks_are_exhausted_before_the_same_step_and_stay_so(ranks: int) -> None:
    """Case D1: one rank runs out of data."""
    job = Job(ListSource(TEXTS), data_ranks=ranks, epochs=1)
    job.steps(10**6)
    for _ in range(2):
        with pytest.raises(DataExhausted, match=r"a list is used up: 1 epoch\(s\)"):
            job.step()
    with pytest.raises(DataExhausted):
        Job(ListSource(TEXTS), data_ranks=ranks, epochs=1).load(job.state()).step()
    more = Job(ListSource(TEXTS), data_ranks=ranks, epochs=2).load(job.state())
    assert counted(more.steps(10**6)) == whole_stream(more)[len(whole_stream(job)) + 1 :]


def test_a_rank_without_tokens_in_the_last_step_gets_labels_that_do_not_count() -> None:
    job = Job(ListSource(["abc"]), data_ranks=4, global_batch=8, batch_size=1, epochs=1)
    (step,) = job.steps(10)
    assert [sum(label != IGNORE for label in labels) for _, labels in step] == [4, 0, 0, 0, 0, 0, 0, 0]
    assert all(token == TOKENIZER.eos_id for tokens, _ in step[1:] for token in tokens)


@pytest.mark.parametrize("changed", [{"seed": 1}, {"shuffle": False}, {"add_bos": False}])
def test_a_position_of_other_data_or_another_order_is_reported(
    changed: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(ListSource(TEXTS))
    job.steps(2)
    Job(ListSource(TEXTS)).load(job.state())
    assert caplog.text == ""
    loader = Job(ListSource(TEXTS), **changed).loaders[0]
    loader.load_state_dict(job.state())
    (name,) = changed
    assert f"{name} changed since the checkpoint" in caplog.text
    next(loader)


@pytest.mark.parametrize("state", [{}, {"sources": 1}, {"sources": {"data": {"epoch": 0, "document": -1}}}])
def test_a_state_that_is_no_position_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="no position"):
        Job(ListSource(TEXTS)).loaders[0].load_state_dict(state)


@pytest.mark.timeout(20)
def test_data_without_text_is_refused_and_does_not_hang() -> None:
    with pytest.raises(ConfigurationError, match="none of the documents holds text"):
        Job(ListSource(["", ""]), epochs=None).step()


class BrokenStream(StreamingSource):
    name = "owner/name"
    fingerprint = ""

    def documents(self, start: int) -> Iterator[str]:
        yield "a" * 100_000
        raise SourceFailed("owner/name: no answer")


def test_a_source_that_stays_away_is_named_with_the_rank() -> None:
    """Case D8."""
    loader = Job(BrokenStream(), data_ranks=2, global_batch=8, batch_size=4, seq_len=50).loaders[1]
    next(loader)
    next(loader)
    with pytest.raises(SourceFailed, match="data-parallel rank 1: owner/name: no answer"):
        list(islice(loader, 1000))


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "stageline-data"]


def test_no_thread_outlives_its_loader() -> None:
    gc.collect()
    before = len(threads())
    job = Job(ListSource(TEXTS), data_ranks=2)
    job.step()
    assert len(threads()) == before + 2
    job.loaders[0].close()
    assert len(threads()) == before + 1
    job.step()
    del job
    gc.collect()
    assert len(threads()) == before


# From the configuration


def test_the_loader_of_a_configuration_holds_the_default_corpus() -> None:
    loader = build_loader(configuration(), TOKENIZER, data_rank=0, data_ranks=1)
    batch = next(loader)
    assert batch.tokens.shape == (2, 16)
    assert loader.state_dict()["sources"]["data"]["stream"]["shuffle"] is True
    loader.close()


def test_accumulation_follows_from_the_global_batch_size(tmp_path: Path) -> None:
    folder = str(write_texts(tmp_path, TEXTS))

    def steps(ranks: int, batch_size: int) -> list[Any]:
        training = {
            "dataset": "text",
            "dataset_path": folder,
            "batch_size": batch_size,
            "global_batch_size": 8,
        }
        config = configuration(training=training, data={"epochs": 1})
        loaders = [build_loader(config, TOKENIZER, data_rank=r, data_ranks=ranks) for r in range(ranks)]
        rounds = 8 // (ranks * batch_size)
        return [np.concatenate([next(loader).tokens for _ in range(rounds) for loader in loaders])]

    np.testing.assert_array_equal(steps(1, 8), steps(1, 2))
    np.testing.assert_array_equal(steps(1, 8), steps(2, 2))
    np.testing.assert_array_equal(steps(1, 8), steps(4, 1))


@pytest.mark.parametrize(("size", "batch_size", "ranks"), [(10, 1, 4), (4, 8, 1), (12, 4, 2)])
def test_a_global_batch_that_does_not_divide_is_refused_not_rounded(
    size: int, batch_size: int, ranks: int
) -> None:
    """Case D6: global batch 10 over 4 ranks silently floored."""
    with pytest.raises(ConfigurationError, match=f"global_batch_size {size} is not a multiple of"):
        accumulation_steps(size, batch_size, ranks)


def test_validation_reads_one_epoch_in_order_from_the_beginning_every_time(tmp_path: Path) -> None:
    folder = str(write_texts(tmp_path, TEXTS))
    config = configuration(
        training={"dataset": "text", "dataset_path": folder, "batch_size": 4, "global_batch_size": 16},
        validation={"batch_size": 3, "seq_len": 5},
    )
    (checked,) = build_validation(config, TOKENIZER, data_rank=0, data_ranks=1)
    loader = checked.loader
    batches = list(loader.from_start())
    labels = np.concatenate([batch.labels.numpy().ravel() for batch in batches])
    expected = [t for text in TEXTS if text for t in TOKENIZER.encode(text, bos=True, eos=True)]
    assert labels[labels != IGNORE].tolist() == expected[1:]
    assert batches[0].tokens.shape == (3, 5)
    again = list(loader.from_start(2))
    assert len(again) == 2
    assert all((a.tokens == b.tokens).all() for a, b in zip(batches, again, strict=False))
    assert loader.state_dict() != build_loader(config, TOKENIZER, data_rank=0, data_ranks=1).state_dict()


@pytest.mark.parametrize("ranks", [2, 4])
def test_validation_over_the_whole_set_has_the_same_number_of_batches_on_every_rank(
    tmp_path: Path, ranks: int
) -> None:
    """Case D9: it hangs when ranks have unequal shards."""
    folder = str(write_texts(tmp_path, TEXTS))
    config = configuration(training={"dataset": "text", "dataset_path": folder})
    counts = [
        len(
            list(build_validation(config, TOKENIZER, data_rank=rank, data_ranks=ranks)[0].loader.from_start())
        )
        for rank in range(ranks)
    ]
    assert len(set(counts)) == 1


def test_validation_has_data_of_its_own(tmp_path: Path) -> None:
    training = str(write_texts(tmp_path / "training", ["aaaa"]))
    held_out = str(write_texts(tmp_path / "held_out", ["bbbb"]))
    config = configuration(
        training={"dataset": "text", "dataset_path": training},
        validation={"dataset": "text", "dataset_path": held_out},
    )
    (checked,) = build_validation(config, TOKENIZER, data_rank=0, data_ranks=1)
    loader = checked.loader
    (batch,) = loader.from_start()
    assert TOKENIZER.decode(batch.tokens[0].tolist()).startswith("bbbb")


def test_no_training_data_is_lost_when_validation_runs_in_between(tmp_path: Path) -> None:
    config = configuration(
        training={"dataset": "text", "dataset_path": str(write_texts(tmp_path, TEXTS))},
    )
    loader = build_loader(config, TOKENIZER, data_rank=0, data_ranks=1)
    checked = build_validation(config, TOKENIZER, data_rank=0, data_ranks=1)[0].loader
    straight = build_loader(config, TOKENIZER, data_rank=0, data_ranks=1)
    for _ in range(4):
        list(checked.from_start(1))
        assert (next(loader).tokens == next(straight).tokens).all()
