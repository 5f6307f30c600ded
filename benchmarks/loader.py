"""How long training waits for data, and tokens per second of the loader against torchtitan 0.2.2's.

    python benchmarks/loader.py [--peer /tmp/peer/bin/python] [--rounds 3] [--workers 0 1 2]

The peer's Python, the text and the tokenizer are those of benchmarks/against_torchtitan.py. All read the same text:
from a token store, from JSON lines, and as a stream of the same files. Printed are:

- waiting in 20 steps of the debug model: `data_seconds` and `step_seconds` of its metrics, without the first 3.
  Wanted: under 1 % where the source is a store.
- the share of waiting beside a step that sleeps, in place of an accelerator, and takes batches of 8 x 2,048 tokens, so
  many of them a second; the median of the rounds.
- tokens per second of the loader alone, not shuffled, in turn with torchtitan's, which has no store: the best round of
  each, after the first batch, of which the first sequence has to be the same. "processor": those of a second of the
  processor, without workers; on a machine that others use, the figure to trust. No tokenizer has threads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import against_torchtitan

from trainer.config.schema import Config
from trainer.data.build import build_loader
from trainer.data.corpora import open_corpus
from trainer.data.loader import Loader
from trainer.data.preparation import Preparation, prepare
from trainer.data.tokenizer import load_tokenizer

_HERE = Path(__file__).resolve().parent
_BATCH, _SEQ_LEN, _WARM_UP, _BATCHES = 8, 2048, 3, 60
_TOKENS = _BATCHES * _BATCH * _SEQ_LEN
_RATES = (100_000, 400_000, 1_600_000)  # tokens per second
_SLEEPING_SECONDS, _FILES = (
    3.0,
    4,
)  # torchtitan's stream waits for ever where there are more workers than files
_TOKENIZER = "tokenizer/tokenizer.json"
# The stream is torchtitan's "c4", which is a configuration "en" of whatever lies at its path.
_CARD = '---\nconfigs:\n- config_name: en\n  data_files: "*.jsonl"\n---\n'


@dataclass(frozen=True)
class Source:
    """The text in one form, and torchtitan's name for it."""

    name: str
    dataset: str
    path: str
    peer: str | None = None


SOURCES = [Source("store", "store", "store"), Source("JSON lines", "jsonl", "data/*.jsonl", "c4_test")]
SOURCES += [Source("stream", "c4", "data", "c4")]


@dataclass(frozen=True)
class Read:
    """Of a loader alone: tokens per second of clock and processor, the first sequence, whether batches repeat."""

    speed: float
    processor: float
    first: list[int]
    repeats: bool = False


@dataclass(frozen=True)
class Bench:
    """What is measured, in a folder."""

    folder: Path

    def prepare(self) -> None:
        """Documents, a tokenizer, a store."""
        against_torchtitan.Bench(self.folder, "", 0).prepare()
        data = self.folder / "data"
        data.mkdir()
        (data / "README.md").write_text(_CARD)
        lines = (self.folder / "text.jsonl").read_text().splitlines(keepends=True)
        for part in range(_FILES):
            (data / f"{part}.jsonl").write_text("".join(lines[part::_FILES]))
        corpus = open_corpus("jsonl", str(data), "text")
        made = prepare(Preparation(corpus, self.folder / _TOKENIZER, self.folder / "store")).metadata
        print(f"{made.documents:,} documents, {made.tokens:,} tokens, {os.cpu_count()} cores")

    def waiting_in_a_run(self, source: Source, workers: int) -> tuple[float, float]:
        """Seconds of waiting, and of a whole step, the mean of the steps after the first ones."""
        run = self.folder / f"run-{source.dataset}-{workers}"
        command = [sys.executable, "-m", "trainer.launch", f"--job.dump_folder={run}"]
        command += [f"--training.{key}={value}" for key, value in self._place(source).items()]
        command += ["--training.steps=20", f"--model.tokenizer_path={self.folder / _TOKENIZER}"]
        _said([*command, f"--data.workers={workers}", "--checkpoint.enable_checkpoint=false"], _HERE.parent)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        waited, whole = ([row[f"{key}_seconds"] for row in rows[_WARM_UP:]] for key in ("data", "step"))
        return statistics.fmean(waited), statistics.fmean(whole)

    def waiting_beside_sleep(self, source: Source, workers: int, rate: int) -> float:
        """The share of the time that steps wait for data, which would else take so many tokens per second."""
        loader, seconds, waited = self._open(source, workers, shuffle=True), _BATCH * _SEQ_LEN / rate, 0.0
        steps = round(_SLEEPING_SECONDS / seconds)
        for step in range(-_WARM_UP, steps):
            began = time.perf_counter()
            next(loader)
            waited += (time.perf_counter() - began) * (step >= 0)
            time.sleep(seconds)
        loader.close()
        return waited / (waited + steps * seconds)

    def alone(self, source: Source, workers: int) -> Read:
        """Of our loader."""
        loader = self._open(source, workers, shuffle=False)
        first = next(loader).tokens[0].tolist()
        began, processor = time.perf_counter(), time.process_time()
        for _ in range(_BATCHES):
            next(loader)
        seconds, processor = time.perf_counter() - began, time.process_time() - processor
        loader.close()
        return Read(_TOKENS / seconds, _TOKENS / processor, first)

    def peer_alone(self, peer: str, source: Source, workers: int) -> Read:
        """Of torchtitan's."""
        command = [peer, str(_HERE / "torchtitan_loader.py"), f"--dataset={source.peer}"]
        command += [f"--path={self.folder / 'data'}", f"--tokenizer={self.folder / 'tokenizer'}"]
        command += [f"--workers={workers}", f"--batches={_BATCHES}", f"--batch-size={_BATCH}"]
        said = _said([*command, f"--seq-len={_SEQ_LEN}"], self.folder)
        return Read(**json.loads(said.splitlines()[-1]))

    def _place(self, source: Source) -> dict[str, str]:
        return {"dataset": source.dataset, "dataset_path": str(self.folder / source.path)}

    def _open(self, source: Source, workers: int, *, shuffle: bool) -> Loader:
        training = {**self._place(source), "batch_size": _BATCH, "seq_len": _SEQ_LEN}
        data = {"workers": workers, "shuffle": shuffle}
        config = Config.model_validate({"training": training, "data": data})
        return build_loader(config, load_tokenizer(self.folder / _TOKENIZER), data_rank=0, data_ranks=1)


def _said(command: list[str], folder: Path) -> str:
    """What a program writes. Raises RuntimeError if it fails."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {done.stdout[-1000:]}{done.stderr[-2000:]}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--peer", help="a Python that has torchtitan 0.2.2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "HF_HOME": folder}
        (bench := Bench(Path(folder))).prepare()
        cases = [(s, w) for s in SOURCES for w in (options.workers if s.peer else [0])]
        rates = "".join(f"{rate:>13,}/s" for rate in _RATES)
        print(f"{'source':12}{'workers':>8}{'waiting, s':>12}{'step, s':>10}{'share':>9}{rates}")
        for source, workers in cases:
            waited, whole = bench.waiting_in_a_run(source, workers)
            row = f"{source.name:12}{workers:8}{waited:12.5f}{whole:10.3f}{waited / whole:9.2%}"
            for rate in _RATES:
                shares = [bench.waiting_beside_sleep(source, workers, rate) for _ in range(options.rounds)]
                row += f"{statistics.median(shares):15.2%}"
            print(row, flush=True)
        print(
            f"\n{'source':12}{'workers':>8}{'Stageline':>14}{'torchtitan':>14}{'ratio':>14}{'processor':>14}"
        )
        for source, workers in cases:
            print(_compared(bench, options.peer, source, workers, options.rounds), flush=True)


def _compared(bench: Bench, python: str | None, source: Source, workers: int, rounds: int) -> str:
    ours, peers = [], []
    for _ in range(rounds):
        ours.append(bench.alone(source, workers))
        if python and source.peer:
            peers.append(bench.peer_alone(python, source, workers))
    speed = max(read.speed for read in ours)
    row = f"{source.name:12}{workers:8}{speed:14,.0f}"
    if not peers:
        return row
    assert all(read.first == ours[0].first for read in peers), "the two loaders do not read the same"
    peer = max(read.speed for read in peers)
    processor = max(read.processor for read in ours) / max(read.processor for read in peers)
    ratio = "" if workers else f"{processor:14.2f}"
    return f"{row}{peer:14,.0f}{speed / peer:14.2f}{ratio:14}{'   repeats' if peers[0].repeats else ''}"


if __name__ == "__main__":
    main()
