"""Real processes that open the same data at the same time get the shares of one global batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets  # here, so that the forked ranks need not

from tests.data.corpora import configuration
from tests.distributed.ranks import run_ranks
from trainer.data.build import build_loader
from trainer.data.errors import DataExhausted
from trainer.data.loader import IGNORE
from trainer.data.tokenizer import ByteTokenizer, debug_tokenizer


def _labels(rank: int, ranks: int, folder: str, cache: str) -> list[list[int]]:
    datasets.config.HF_DATASETS_CACHE = Path(cache)
    config = configuration(
        training={"dataset": "jsonl", "dataset_path": folder, "batch_size": 1, "global_batch_size": 4},
        data={"epochs": 1},
    )
    loader = build_loader(config, ByteTokenizer(), data_rank=rank, data_ranks=ranks)
    found: list[list[int]] = []
    while True:
        try:
            found += next(loader).labels.tolist()
        except DataExhausted:
            return found


def test_ranks_that_open_a_table_at_once_share_it_and_end_together(tmp_path: Path) -> None:
    for number in range(3):
        rows = [json.dumps({"text": f"{number} {i} " * 9}) + "\n" for i in range(1 + 5 * number)]
        (tmp_path / f"{number}.jsonl").write_text("".join(rows))

    def epoch(ranks: int) -> list[list[int]]:
        shares = run_ranks(_labels, ranks, ranks, str(tmp_path), str(tmp_path / f"cache{ranks}"))
        assert len({len(share) for share in shares}) == 1
        return [sequence for group in zip(*shares, strict=True) for sequence in group]

    one = epoch(1)
    assert epoch(2) == one
    assert epoch(4) == one
    assert sum(label != IGNORE for sequence in one for label in sequence) > 600


def _train(rank: int, folder: str) -> Any:
    from tests.data.corpora import SENTENCES, ListSource

    path = debug_tokenizer(Path(folder), 400, ListSource(SENTENCES * 20))
    return path.read_bytes()


def test_ranks_that_make_the_debug_tokenizer_at_once_all_find_it_whole(tmp_path: Path) -> None:
    contents = run_ranks(_train, 4, str(tmp_path))
    assert len(set(contents)) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["tokenizer.model"]
