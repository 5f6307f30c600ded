"""Seconds from the launch to the first logged step, against the least that any launcher must pay.

    python benchmarks/time_to_first_step.py [--ranks 1 4] [--rounds 3]

The limit is that of as many processes that import what the trainer needs from torch, at the same time, and then
do one forward and backward of the debug model; the ratio printed is ours / limit, of the medians.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_LIMIT = """
import torch, torch.distributed.fsdp, torch._dynamo
from models.registry import configured_sizes, family
model = family("llama3").build(configured_sizes("llama3", "debug", "rmsnorm", {}))
model(torch.zeros(8, 256, dtype=torch.long)).sum().backward()
"""


def first_step(ranks: int) -> float:
    """Launch the debug configuration with a pipeline over all ranks; stop when the first step is logged."""
    folder = Path(tempfile.mkdtemp())
    command = [str(ROOT / "run_train.sh"), "--job.dump_folder", str(folder), "--training.steps", "1"]
    command += [
        "--experimental.pipeline_parallel_degree",
        str(ranks),
        "--checkpoint.enable_checkpoint",
        "false",
    ]
    command += ["--model.tokenizer_path", "byte"]
    start = time.perf_counter()
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    metrics = folder / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        if job.poll() not in (None, 0):
            sys.exit(f"the job ended with exit code {job.returncode}: {' '.join(command)}")
        time.sleep(0.02)
    seconds = time.perf_counter() - start
    job.wait()
    shutil.rmtree(folder)
    return seconds


def limit(ranks: int) -> float:
    """As many bare processes, all at once."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),
    }
    start = time.perf_counter()
    processes = [subprocess.Popen([sys.executable, "-c", _LIMIT], env=environment) for _ in range(ranks)]
    for process in processes:
        process.wait()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for ranks in options.ranks:
        ours, bare = [], []
        for _ in range(options.rounds):
            ours.append(first_step(ranks))
            bare.append(limit(ranks))
        first, least = statistics.median(ours), statistics.median(bare)
        print(
            f"{ranks} ranks: first step after {first:.1f} s, limit {least:.1f} s, ratio {first / least:.2f}"
        )


if __name__ == "__main__":
    main()
