"""Mixtures: the same tokens for every number of ranks and workers, straight and resumed, in the shares asked for."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.corpora import ListSource, ListStream
from trainer.data.errors import DataExhausted, SourceFailed
from trainer.data.loader import Loader, Share
from trainer.data.mixture import Member, Mixture, Packing
from trainer.data.sources import FlawedText, Source, TokenizedSource
from trainer.data.stream import TokenStream
from trainer.data.tokenizer import ByteTokenizer, Tokenizer

TOKENIZER = ByteTokenizer()
SEQ_LEN, GLOBAL_BATCH = 6, 8


class ListStore(TokenizedSource):
    """Texts that are tokens already; remembers whose tokens were asked for."""

    def __init__(self, texts: list[str]) -> None:
        import numpy as np

        self.name, self.fingerprint = "a store", f"{len(texts)} documents"
        self._documents = [np.array(TOKENIZER.encode(text, True, True), dtype=np.uint16) for text in texts]
        self.total_tokens = sum(map(len, self._documents))

    def __len__(self) -> int:
        return len(self._documents)

    def read(self, index: int) -> Any:
        return self._documents[index]

    def lengths(self, indices: Any) -> Any:
        raise AssertionError("not needed")

    def check(self, tokenizer: Tokenizer, add_bos: bool, add_eos: bool) -> None: ...

    def save_tokenizer(self, folder: Path) -> None: ...


def three_sources(epochs: int | None, kind: str = "cut") -> Mixture:
    texts = {name: [f"{name}{i}" * (1 + i * 5 % 7) for i in range(9)] for name in "abc"}
    sources: list[Source] = [ListStore(texts["a"]), ListStream(texts["b"]), ListSource(texts["c"])]
    members = [
        Member(name, TokenStream(source, TOKENIZER, True, epochs=epochs, shuffle_buffer=4), weight)
        for name, source, weight in zip("abc", sources, (3.0, 1.0, 2.0), strict=True)
    ]
    return Mixture(members, Packing(SEQ_LEN, kind, 4), seed=5)  # type: ignore[arg-type]


class Ranks:
    """The loaders of all data-parallel ranks."""

    def __init__(self, mixture: Mixture, ranks: int, batch_size: int, workers: int = 0) -> None:
        self.accumulation = GLOBAL_BATCH // (ranks * batch_size)
        self.loaders = [
            Loader(
                mixture,
                Share(batch_size, rank, ranks, self.accumulation),
                mask_documents=True,
                workers=workers,
            )
            for rank in range(ranks)
        ]

    def steps(self, most: int) -> list[list[Any]]:
        """Global batches: of each sequence the tokens, labels and documents."""
        found = []
        try:
            for _ in range(most):
                step: list[Any] = []
                for _ in range(self.accumulation):
                    for batch in [next(loader) for loader in self.loaders]:
                        assert batch.documents is not None
                        step += zip(
                            batch.tokens.tolist(),
                            batch.labels.tolist(),
                            batch.documents.tolist(),
                            strict=True,
                        )
                found.append(step)
        except DataExhausted:
            pass
        return found

    def state(self) -> dict[str, Any]:
        states = [loader.state_dict() for loader in self.loaders]
        assert all(state == states[0] for state in states)
        restored: dict[str, Any] = json.loads(json.dumps(states[0]))
        return restored

    def load(self, state: dict[str, Any]) -> Ranks:
        for loader in self.loaders:
            loader.load_state_dict(state)
        assert self.state() == state
        return self

    def close(self) -> None:
        for loader in self.loaders:
            loader.close()


layouts = st.sampled_from([(1, 8), (1, 2), (2, 2), (4, 1), (4, 2)])


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(["cut", "best_fit"]),
    first=layouts,
    second=layouts,
    third=layouts,
    cuts=st.tuples(st.integers(0, 8), st.integers(0, 8)),
    epochs=st.sampled_from([None, 2]),
)
def test_a_mixture_of_store_stream_and_files_is_the_same_resumed_twice_on_other_degrees(
    kind: str, first: Any, second: Any, third: Any, cuts: tuple[int, int], epochs: int | None
) -> None:
    """Cases D2, D5 and D7, over two epochs, to the end."""
    straight = Ranks(three_sources(epochs, kind), 1, 8).steps(25)
    one = Ranks(three_sources(epochs, kind), *first)
    found = one.steps(cuts[0])
    two = Ranks(three_sources(epochs, kind), *second).load(one.state())
    found += two.steps(cuts[1])
    three = Ranks(three_sources(epochs, kind), *third).load(two.state())
    assert found + three.steps(25 - len(found)) == straight


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(workers: int) -> None:
    straight = Ranks(three_sources(2), 1, 8).steps(100)
    first = Ranks(three_sources(2), 2, 2, workers)
    found = first.steps(5)
    second = Ranks(three_sources(2), 1, 4, workers).load(first.state())
    assert found + second.steps(100) == straight
    first.close()
    second.close()


def test_shares_are_the_weights_and_the_order_is_random() -> None:
    loader = Ranks(three_sources(None), 1, 8).loaders[0]
    for _ in range(75):
        next(loader)
    sequences = {name: each["sequences"] for name, each in loader.state_dict()["sources"].items()}
    assert sum(sequences.values()) == 600
    for name, share in {"a": 300, "b": 100, "c": 200}.items():
        assert abs(sequences[name] - share) <= 2
    mixture = three_sources(None)
    order = []
    places = mixture.start
    for _, after in mixture.rows(places):
        order.append(next(i for i, pair in enumerate(zip(places, after, strict=True)) if pair[0] != pair[1]))
        places = after
        if len(order) == 600:
            break
    assert len({tuple(order[i : i + 6]) for i in range(0, 600, 6)}) > 10


def test_a_source_that_has_ended_is_left_out_and_limits_hold() -> None:
    texts = ["x" * 20] * 50
    members = [
        Member("long", TokenStream(ListSource(texts), TOKENIZER, epochs=2)),
        Member("short", TokenStream(ListSource(texts), TOKENIZER, epochs=1, documents=5)),
        Member("limited", TokenStream(ListSource(texts), TOKENIZER), limit_tokens=100),
    ]
    ranks = Ranks(Mixture(members, Packing(SEQ_LEN)), 2, 4)
    ranks.steps(10**6)
    counts = ranks.loaders[0].counts
    assert counts.tokens == {"long": 2 * 50 * 22, "short": 5 * 22, "limited": 96}
    assert 0.9 < counts.packing_efficiency <= 1
    again = Ranks(Mixture(members, Packing(SEQ_LEN)), 1, 8).load(ranks.state())
    with pytest.raises(DataExhausted, match="the epochs and limits of all sources are over"):
        next(again.loaders[0])


def test_changed_weights_hold_from_the_resume_on_and_a_new_source_begins_at_its_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    texts = [f"{i} text" for i in range(40)]

    def mixture(**weights: float) -> Mixture:
        members = [Member(n, TokenStream(ListSource(texts), TOKENIZER), w) for n, w in weights.items()]
        return Mixture(members, Packing(SEQ_LEN))

    before = Ranks(mixture(a=1.0), 1, 8)
    before.steps(20)
    after = Ranks(mixture(a=1.0, b=3.0), 1, 8)
    after.loaders[0].load_state_dict(before.state())
    after.steps(5)
    sources = after.state()["sources"]
    assert abs(sources["a"]["sequences"] - 170) <= 2
    assert abs(sources["b"]["sequences"] - 30) <= 2
    assert "is not in the checkpoint's data" in caplog.text


@pytest.mark.parametrize("resumed_after", [0, 1, 3])
def test_bad_documents_are_counted_once_also_across_a_resume(resumed_after: int) -> None:
    texts = [
        "ab" * 9,
        FlawedText("", "f.jsonl, line 2: broken"),
        "cd" * 9,
        FlawedText("x\ufffd", "f, byte 9"),
    ]

    def ranks() -> Ranks:
        stream = TokenStream(ListSource(texts), TOKENIZER, epochs=3)
        return Ranks(Mixture.of(stream, SEQ_LEN), 1, 8)

    first = ranks()
    first.steps(resumed_after)
    second = ranks().load(first.state())
    second.steps(100)
    assert second.loaders[0].counts.bad_documents == 6


def test_the_first_ten_bad_documents_are_named_and_all_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    texts = ["ab" * 9, *(FlawedText("", f"f.jsonl, line {i}: broken") for i in range(30))]
    ranks = Ranks(Mixture.of(TokenStream(ListSource(texts), TOKENIZER, epochs=1), SEQ_LEN), 1, 8)
    ranks.steps(100)
    assert ranks.loaders[0].counts.bad_documents == 30
    assert caplog.text.count(": broken") == 10
    assert caplog.text.count("counted only") == 1


def test_a_bad_document_stops_the_run_if_that_is_asked_for() -> None:
    texts = ["ab", FlawedText("", "f.jsonl, line 2: broken")]
    stream = TokenStream(ListSource(texts), TOKENIZER, epochs=1, on_error="stop")
    loader = Loader(Mixture.of(stream, SEQ_LEN), Share(1))
    with pytest.raises(SourceFailed, match=r"data-parallel rank 0: a list: f\.jsonl, line 2: broken"):
        list(iter(loader.__next__, None))


def processes(parent: int) -> list[int]:
    """The data workers that a process has started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command = (entry / "cmdline").read_bytes()
                status = (entry / "status").read_text()
            except OSError:
                continue
            if b"encoding_worker" in command and f"PPid:\t{parent}\n" in status:
                found.append(int(entry.name))
    return found


def test_a_worker_that_dies_is_named_with_the_reason_and_none_is_left() -> None:
    texts = [f"{i} " * 20_000 for i in range(50)]
    loader = Loader(Mixture.of(TokenStream(ListSource(texts), TOKENIZER), 64), Share(1), workers=2)
    next(loader)
    victim, _ = processes(os.getpid())
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(SourceFailed, match=rf"data worker \d \(process {victim}\) was killed by SIGKILL"):
        list(iter(loader.__next__, None))
    loader.close()
    assert not processes(os.getpid())


def test_workers_do_not_outlive_a_rank_that_is_killed() -> None:
    reading, writing = os.pipe()
    rank = os.fork()
    if rank == 0:
        stream = TokenStream(ListSource(["text " * 30_000] * 9), TOKENIZER)
        loader = Loader(Mixture.of(stream, 64), Share(1), workers=2)
        next(loader)
        os.write(writing, b"1")
        time.sleep(60)
        os._exit(0)
    os.read(reading, 1)
    started = processes(rank)
    assert len(started) == 2
    os.kill(rank, signal.SIGKILL)
    os.waitpid(rank, 0)
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{worker}/cmdline").exists() for worker in started):
        assert time.monotonic() < deadline, "a worker has outlived its rank"
        time.sleep(0.05)
