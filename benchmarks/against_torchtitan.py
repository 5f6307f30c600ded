"""Tokens per second of each kind of layout against torchtitan 0.2.2: same model, batch, text and steps, same run.

    python -m venv /tmp/peer && /tmp/peer/bin/pip install -c constraints.txt torch datasets tokenizers tomli tyro \\
        torchdata einops tensorboard tabulate pillow
    /tmp/peer/bin/pip install --no-deps torchtitan==0.2.2 torchao
    python benchmarks/against_torchtitan.py --peer /tmp/peer/bin/python [--only fsdp,tensor]

torchtitan runs on the CPU with patches that torchtitan_rank.py makes. The model is torchtitan's debug model (6
layers of width 256) in fp32, with a vocabulary of 32 times the width, as Llama 3 8B has it; each data-parallel rank
gets 4 sequences of 512 tokens. Both programs are started, and one runs while the other is stopped, for a few seconds
each in turn, so that a machine's moods meet both. Speed is the median of all steps but the first ones. Losses are
compared too. Where torchtitan's gradient norm is not the one-process run's, that is said; ours is compared with it in the tests.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from trainer.ports import free_port

_HERE = Path(__file__).resolve().parent
_BATCH, _SEQ_LEN, _WARM_UP = 4, 512, 4
_TIMEOUT = 900
_TURN = 6.0  # seconds; a rank that stands still for ten counts as dead
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_LINE = re.compile(r"step:\s*(\d+)\s+loss:\s*(\S+)\s+grad_norm:\s*(\S+).*?tps:\s*([\d,]+)")


@dataclass(frozen=True)
class Kind:
    """A layout as both programs spell it; `peer` is None where torchtitan has no such thing on a CPU."""

    name: str
    ranks: int
    ours: tuple[str, ...]
    peer: tuple[str, ...] | None
    batch: int = _BATCH


@dataclass(frozen=True)
class Result:
    """Of one run: tokens per second of the whole job, the last loss and the first gradient norm."""

    speed: float
    loss: float
    norm: float


def _pipeline(schedule: str, ours: Sequence[str] = ()) -> Kind:
    return Kind(
        f"pipeline {schedule}",
        2,
        (
            "--experimental.pipeline_parallel_degree=2",
            f"--experimental.pipeline_parallel_schedule={schedule}",
            "--experimental.pipeline_parallel_microbatches=4",
            *ours,
        ),
        (
            "--parallelism.pipeline_parallel_degree=2",
            f"--parallelism.pipeline_parallel_schedule={schedule}",
            "--parallelism.pipeline_parallel_microbatch_size=1",
        ),
    )


_ONE_NODE = ("--parallelism.data_parallel_shard_degree=1",)
KINDS = (
    Kind("one process", 1, (), ()),
    Kind("one process, compiled", 1, ("--training.compile=true",), ("--compile.enable",)),
    Kind(
        "replicate",
        2,
        ("--training.data_parallel_replicate_degree=2",),
        ("--parallelism.data_parallel_replicate_degree=2", *_ONE_NODE),
    ),
    Kind("fsdp", 2, ("--training.data_parallel_shard_degree=2",), ()),
    Kind(
        "tensor",
        2,
        ("--training.tensor_parallel_degree=2",),
        ("--parallelism.tensor_parallel_degree=2", *_ONE_NODE),
    ),
    _pipeline("1F1B"),
    _pipeline("GPipe"),
    _pipeline("Interleaved1F1B"),
    _pipeline("ZBVZeroBubble"),
    Kind("context", 2, ("--experimental.context_parallel_degree=2",), None),
)


@dataclass
class Bench:
    """Where everything lies, and what has been measured."""

    folder: Path
    peer: str
    steps: int
    vocabulary: int = 2048

    def prepare(self) -> None:
        """A text of some thousand documents, and a tokenizer trained on it."""
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        texts = [file.read_text("utf-8", "replace") for file in files]
        documents = [text[k : k + 2048] for text in texts for k in range(0, len(text), 2048)][:6000]
        with (self.folder / "text.jsonl").open("w") as out:
            out.writelines(json.dumps({"text": document}) + "\n" for document in documents)
        tokenizer = Tokenizer(BPE())
        tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
        special = ["<s>", "</s>"]
        tokenizer.train_from_iterator(
            documents,
            BpeTrainer(
                vocab_size=self.vocabulary, special_tokens=special, initial_alphabet=ByteLevel.alphabet()
            ),
        )
        assets = self.folder / "tokenizer"
        assets.mkdir()
        tokenizer.save(str(assets / "tokenizer.json"))
        names = {"bos_token": "<s>", "eos_token": "</s>"}
        (assets / "tokenizer_config.json").write_text(json.dumps(names))
        (self.folder / "config.toml").write_text(
            _OURS.format(folder=self.folder, steps=self.steps, vocabulary=self.vocabulary)
        )

    def run(self, kind: Kind) -> tuple[Result, Result | None]:
        """Ours and the peer's, if it has this kind."""
        name = kind.name.replace(" ", "-").replace(",", "")
        ours, peer = self.folder / f"ours-{name}", self.folder / f"peer-{name}"
        jobs = [self._start(self._our_command(kind, ours), kind.ranks, ours.with_suffix(".log"))]
        if kind.peer is not None:
            command = self._peer_command(kind, kind.peer, peer)
            jobs.append(self._start(command, kind.ranks, peer.with_suffix(".log")))
        _take_turns(jobs)
        return _our_result(ours), None if kind.peer is None else _peer_result(peer, kind.ranks)

    def _our_command(self, kind: Kind, run: Path) -> list[str]:
        program = [
            *(sys.executable, str(_HERE.parent / "train.py")),
            *("--config", str(self.folder / "config.toml")),
        ]
        return [*program, f"--job.dump_folder={run}", f"--training.batch_size={kind.batch}", *kind.ours]

    def _peer_command(self, kind: Kind, options: Sequence[str], run: Path) -> list[str]:
        data = self.folder / "data" / "text.jsonl"
        data.parent.mkdir(exist_ok=True)
        if not data.exists():
            data.hardlink_to(self.folder / "text.jsonl")
        return [
            *(self.peer, str(_HERE / "torchtitan_rank.py"), str(self.vocabulary), *_PEER, *options),
            f"--job.dump_folder={run}",
            f"--training.steps={self.steps}",
            f"--training.local_batch_size={kind.batch}",
            f"--training.dataset_path={data.parent}",
            f"--model.hf_assets_path={self.folder / 'tokenizer'}",
        ]

    def _start(self, command: Sequence[str], ranks: int, log: Path) -> Job:
        """All ranks; their output goes to one file."""
        port, cores = free_port(), os.cpu_count() or 1
        processes = []
        with log.open("w") as out:
            for rank in range(ranks):
                environment = {
                    **os.environ,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "LOCAL_WORLD_SIZE": str(ranks),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "OMP_NUM_THREADS": str(max(1, cores // ranks)),
                    "HF_HUB_OFFLINE": "1",
                    "TORCHELASTIC_RUN_ID": "benchmark",
                    "PYTHONPATH": str(_HERE.parent),
                    "TOKENIZERS_PARALLELISM": "false",
                }
                processes.append(
                    subprocess.Popen(command, env=environment, stdout=out, stderr=out, cwd=self.folder)
                )
        return Job(processes, log)


@dataclass(frozen=True)
class Job:
    """The ranks of a program, and the file with what they say."""

    ranks: Sequence[subprocess.Popen[bytes]]
    log: Path

    @property
    def runs(self) -> bool:
        return any(rank.poll() is None for rank in self.ranks)

    def signal(self, number: int) -> None:
        for rank in self.ranks:
            rank.send_signal(number)


def _take_turns(jobs: Sequence[Job]) -> None:
    """Until all have ended, one runs while the others stand still. Raises RuntimeError where a rank fails."""
    end = time.monotonic() + _TIMEOUT
    try:
        while any(job.runs for job in jobs):
            for turn in (job for job in jobs if job.runs):
                for job in jobs:
                    job.signal(signal.SIGCONT if job is turn else signal.SIGSTOP)
                until = time.monotonic() + _TURN
                while turn.runs and time.monotonic() < until:
                    time.sleep(0.1)
            if time.monotonic() > end:
                raise RuntimeError(f"not at its end after {_TIMEOUT} s: {[str(job.log) for job in jobs]}")
    finally:
        for job in jobs:
            job.signal(signal.SIGKILL)
    for job in jobs:
        if any(rank.wait() for rank in job.ranks):
            raise RuntimeError(f"a rank failed: {job.log}:\n{job.log.read_text()[-2000:]}")


def _our_result(run: Path) -> Result:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    speeds = [line["tokens_per_second"] for line in lines if line["step"] > _WARM_UP]
    return Result(statistics.median(speeds), lines[-1]["loss"], lines[0]["grad_norm"])


def _peer_result(run: Path, ranks: int) -> Result:
    found = _LINE.findall(_COLOURS.sub("", run.with_suffix(".log").read_text()))
    # The loss stands in the log of the rank that has it; elsewhere it is negative.
    steps = [(int(s), float(loss), float(norm), float(t.replace(",", ""))) for s, loss, norm, t in found]
    steps = [step for step in steps if step[1] > 0]
    # torchtitan divides by the ranks that share a token.
    speed = statistics.median(step[3] for step in steps if step[0] > _WARM_UP) * ranks
    return Result(speed, steps[-1][1], steps[0][2])


_OURS = """\
[metrics]
log_freq = 1
disable_color_printing = true
[model]
name = "llama3"
flavor = "debug"
tokenizer_path = "{folder}/tokenizer/tokenizer.json"
[model.override]
n_layers = 6
n_heads = 16
n_kv_heads = 16
ffn_hidden = 768
vocab_size = {vocabulary}
[optimizer]
lr = 8e-4
[data]
shuffle = false
[training]
dataset = "jsonl"
dataset_path = "{folder}/text.jsonl"
seq_len = 512
steps = {steps}
warmup_steps = 2
mixed_precision_param = "float32"
"""
_PEER = (
    "--model.name=llama3",
    "--model.flavor=debugmodel",
    "--optimizer.lr=8e-4",
    "--lr_scheduler.warmup_steps=2",
    f"--training.seq_len={_SEQ_LEN}",
    "--training.dataset=c4_test",
    "--training.mixed_precision_param=float32",
    "--metrics.log_freq=1",
    "--activation_checkpoint.mode=none",
)


def main() -> None:
    """Run all kinds and print the ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", required=True, help="a Python that has torchtitan 0.2.2")
    parser.add_argument("--only", default="", help="kinds whose names contain one of these, by comma")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--vocabulary", type=int, default=8192)
    options = parser.parse_args()
    wanted = [name for name in options.only.split(",") if name]
    kinds = [kind for kind in KINDS if not wanted or any(name in kind.name for name in wanted)]
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), options.peer, options.steps, options.vocabulary)
        bench.prepare()
        print(
            f"{'layout':24} {'Stageline':>10} {'torchtitan':>10} {'ratio':>6}   loss              first norm"
        )
        for kind in kinds:
            us, peer = bench.run(kind)
            if peer is None:
                print(f"{kind.name:24} {us.speed:10,.0f} {'-':>10} {'-':>6}   {us.loss:.3f}", flush=True)
                continue
            print(
                f"{kind.name:24} {us.speed:10,.0f} {peer.speed:10,.0f} {us.speed / peer.speed:6.2f}   "
                f"{us.loss:.3f} / {peer.loss:.3f}     {us.norm:.3f} / {peer.norm:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
