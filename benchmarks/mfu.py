"""Model FLOPs utilisation of a training run on one device, against the device's own matrix products.

    python benchmarks/mfu.py --config llama_1b.toml [--steps 20] [--table.key=value ...]
    python benchmarks/mfu.py --config llama_1b.toml --variants

The physical limit is measured in the same run: large matrix products in the number format of the run. Printed
are the tokens per second, the model FLOPs per second that they are, their ratio to the measured limit, and, where
the device's published peak is known, the MFU. `--variants` runs the configuration as it is, compiled, with full
activation checkpointing, and on an accelerator with float8. Without an accelerator use debug.toml.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from trainer.config.load import load
from trainer.plan.plan import make_plan

_ROOT = Path(__file__).resolve().parent.parent
_WARM_UP = 5  # steps that are not counted: compilation, allocation
_VARIANTS: dict[str, tuple[str, ...]] = {
    "as configured": (),
    "compiled": ("--training.compile=true",),
    "full checkpointing": ("--activation_checkpoint.mode=full",),
    "compiled, full checkpointing": ("--training.compile=true", "--activation_checkpoint.mode=full"),
}
_FLOAT8 = ("--training.compile=true", "--float8.enable_float8_linear=true")


def matmul_flops(dtype: torch.dtype, device: torch.device) -> float:
    """The most floating-point operations per second that square matrix products reach here."""
    best, sizes = 0.0, (4096, 8192) if device.type == "cuda" else (1024, 2048)
    for size in sizes:
        a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
        for _ in range(6):
            _wait(device)
            start = time.perf_counter()
            a @ b
            _wait(device)
            best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def run(arguments: Sequence[str], steps: int) -> tuple[float, float | None]:
    """Tokens per second and MFU of a run of its own: medians over its steps."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(_ROOT / "train.py"), *arguments]
        command += [
            f"--job.dump_folder={folder}",
            f"--training.steps={steps + _WARM_UP}",
            "--metrics.log_freq=1",
        ]
        command += ["--checkpoint.enable_checkpoint=false", "--validation.enable=false"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=_ROOT)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"] > _WARM_UP]
    mfu = [row["mfu"] for row in rows if row["mfu"] is not None]
    return statistics.median(row["tokens_per_second"] for row in rows), statistics.median(
        mfu
    ) if mfu else None


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--variants", action="store_true")
    options, keys = parser.parse_known_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = load(["--config", options.config, *keys]).config
    dtype = getattr(torch, config.training.mixed_precision_param)
    limit, flops = matmul_flops(dtype, device), make_plan(config, 1).flops_per_token
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"{name}: matrix products in {dtype} reach {limit / 1e12:.3f} TFLOP/s")
    variants = dict(_VARIANTS) if options.variants else {"as configured": ()}
    if options.variants and device.type == "cuda":
        variants["compiled, float8"] = _FLOAT8
    print(f"{'variant':30} {'tokens/s':>10} {'TFLOP/s':>9} {'of products':>11} {'MFU':>6}")
    for variant, more in variants.items():
        speed, mfu = run(["--config", options.config, *keys, *more], options.steps)
        shown = "-" if mfu is None else f"{mfu:.1%}"
        model = speed * flops
        print(f"{variant:30} {speed:10,.0f} {model / 1e12:9.3f} {model / limit:11.1%} {shown:>6}", flush=True)


if __name__ == "__main__":
    main()
