"""Memory and speed of import and export of a random model, against copying the same bytes.

    python benchmarks/convert_weights.py [--folder /tmp] [--flavor 1B] [--repeats 3]

The model is a Llama 3.2 in bfloat16 (1B: 2.5 GB), its files at most 1 GB each. `stageline import-hf` makes a run folder
of it, `stageline export-hf` a Hugging Face folder of that. Each runs in a process of its own, whose highest resident
memory (VmHWM) the kernel reports; the goal is less than 1 GB beyond the largest tensor, whatever the size of the model. The
limit of speed is `cp` of the folder with the data flushed to the disk, which the conversions do too. Seconds are those
of the process without its start (imports), which the same command on a tiny model takes; each is the median of the
repeats, in which copy, import and export take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from models.llama import hf
from models.llama.sizes import LLAMA3_2, LlamaSizes
from trainer.weights.safetensors_format import Planned, header
from trainer.weights.tensor_file import data_of

# Not what `wait4` says: that counts what the parent held when it started the child.
_PROGRAM = """
import sys
from trainer.commands.main import main
code = main(sys.argv[1:])
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")))
sys.exit(code)
"""
_FILE_BYTES = 1_000_000_000
_GB = 1e9


@dataclass(frozen=True)
class Measured:
    """One run of a process."""

    seconds: float
    peak: int  # bytes of resident memory


def main() -> None:
    arguments = _parse()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        sizes = LLAMA3_2[arguments.flavor]
        tensors = write_model(folder / "theirs", sizes)
        write_model(
            folder / "tiny", replace(sizes, dim=64, n_layers=1, n_heads=2, n_kv_heads=1, vocab_size=64)
        )
        size, largest = sum(each.size for each in tensors), max(each.size for each in tensors)
        print(
            f"Llama 3.2 {arguments.flavor}, bfloat16: {size / _GB:.2f} GB, largest tensor {largest / _GB:.2f} GB"
        )
        start = {kind: measure(folder, kind, "tiny").seconds for kind in ("import", "export")}
        rounds = [measure_round(folder) for _ in range(arguments.repeats)]
        copied = statistics.median(each["copy"].seconds for each in rounds)
        print(f"copy    {copied:6.1f} s  {size / copied / _GB:5.2f} GB/s")
        for kind in ("import", "export"):
            seconds = statistics.median(each[kind].seconds - start[kind] for each in rounds)
            beyond = max(each[kind].peak for each in rounds) - largest
            print(
                f"{kind}  {seconds:6.1f} s  {size / seconds / _GB:5.2f} GB/s, {copied / seconds:.2f} of the copy's; "
                f"peak memory {beyond / _GB:.2f} GB beyond the largest tensor (start {start[kind]:.1f} s)"
            )


def measure_round(folder: Path) -> dict[str, Measured]:
    """Copy, import and export the model once, and remove what they made."""
    return {
        "copy": copy(folder / "theirs", folder),
        **{k: measure(folder, k, "theirs") for k in ("import", "export")},
    }


def measure(folder: Path, kind: str, name: str) -> Measured:
    """Import `name` as `name.run`, or export that."""
    run, out = folder / f"{name}.run", folder / f"{name}.out"
    if kind == "import":
        shutil.rmtree(run, ignore_errors=True)
        return run_process(["import-hf", str(folder / name), str(run)])
    measured = run_process(["export-hf", str(run), str(out)])
    shutil.rmtree(out)
    return measured


def run_process(arguments: Sequence[str]) -> Measured:
    """`stageline ARGUMENTS` in a process of its own."""
    command = [sys.executable, "-c", _PROGRAM, *arguments]
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(f"stageline {' '.join(arguments)} failed: {done.stderr}")
    return Measured(seconds, 1024 * int(done.stdout.split()[-2]))


def copy(source: Path, folder: Path) -> Measured:
    """Copy a folder and flush the copy to the disk."""
    target = folder / "copy"
    started = time.perf_counter()
    shutil.copytree(source, target)
    for path in target.iterdir():
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    shutil.rmtree(target)
    return Measured(seconds, 0)


def write_model(folder: Path, sizes: LlamaSizes) -> list[Planned]:
    """A Hugging Face folder of random numbers, in files of at most 1 GB."""
    folder.mkdir()
    config = {**hf.config_of(sizes), "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = [Planned(weight.theirs[0], "BF16", weight.shape) for weight in hf.weights_of(sizes)]
    files: list[list[Planned]] = [[]]
    for tensor in tensors:
        if sum(each.size for each in files[-1]) + tensor.size > _FILE_BYTES:
            files.append([])
        files[-1].append(tensor)
    placed = {}
    for number, of_file in enumerate(files, start=1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        placed |= {tensor.name: name for tensor in of_file}
        with (folder / name).open("wb") as file:
            file.write(header(of_file))
            for tensor in of_file:
                file.write(data_of(torch.randn(tensor.shape).bfloat16()))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return tensors


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure"
    )
    parser.add_argument("--flavor", choices=sorted(LLAMA3_2), default="1B")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
