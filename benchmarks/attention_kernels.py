"""Forward and backward of attention with each kernel and mask, as a multiple of causal order with torch's own choice.

    python benchmarks/attention_kernels.py [--length 2048] [--rows 2] [--documents 8] [--window 256] [--repeats 5]

On a CPU in float32, where flex attention has no gradients and flash attention no masks; on an accelerator in bfloat16.
Documents are of equal length. The mask is made once and not counted, as in a model, whose layers share it. Best of the
repeats, taken in turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import get_args

import torch
from torch import Tensor

from models.layers.attend import Attend, KernelName, use_attention_kernel, with_masks
from models.layers.sequences import Sequences

HEADS, KEY_HEADS, WIDTH = 32, 8, 128


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("length", 2048), ("rows", 2), ("documents", 8), ("window", 256), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    leaves = [
        torch.randn(options.rows, heads, options.length, WIDTH, device=device, dtype=_dtype(device))
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]
    cases = {
        (kernel, mask): case
        for mask in ("causal", "documents", "window")
        for kernel in get_args(KernelName)
        if (case := _case(kernel, mask, leaves, options)) is not None
    }
    best = dict.fromkeys(cases, float("inf"))
    for _ in range(options.repeats):
        for key, case in cases.items():
            best[key] = min(best[key], _seconds(case, device))
    reference = best["sdpa", "causal"]
    print(
        f"{device.type}: {options.rows} x {options.length} tokens, {HEADS} heads of {WIDTH}, {KEY_HEADS} of keys"
    )
    print(f"{'mask':<10} {'kernel':<6} {'ms':>9}  x causal sdpa")
    for (kernel, mask), seconds in best.items():
        print(f"{mask:<10} {kernel:<6} {seconds * 1e3:9.2f}  {seconds / reference:.2f}")


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _case(
    kernel: KernelName, mask: str, leaves: list[Tensor], options: argparse.Namespace
) -> Callable[[], None] | None:
    """One forward and backward; None where the device has no such kernel."""
    q, k, v = (leaf.detach().requires_grad_() for leaf in leaves)
    if q.device.type == "cpu" and (kernel == "flex" or (kernel == "flash" and mask != "causal")):
        return None
    attend = Attend(window=options.window if mask == "window" else None)
    use_attention_kernel(attend, kernel, q.device, documents_are_masked=mask == "documents")
    place = torch.arange(options.length, device=q.device)
    documents = (place * options.documents // options.length).expand(options.rows, -1)
    sequences = Sequences(place, documents if mask == "documents" else None)
    sequences = with_masks(sequences, [attend], options.rows, q.dtype)

    def run() -> None:
        attend(q, k, v, sequences).sum().backward()

    run()  # compiles
    return run


def _seconds(run: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
