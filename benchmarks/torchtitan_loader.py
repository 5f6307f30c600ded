"""torchtitan 0.2.2's own loader alone, timed.

Run by loader.py under a Python that has torchtitan; not by itself. Prints one line of JSON: tokens per second of the
clock and of the processor after the first batch, the first sequence, and whether the second batch repeats the first.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import types

import torch


def main() -> None:
    """Build the loader as torchtitan's trainer does, and read from it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--path", required=True)
    parser.add_argument("--tokenizer", required=True)
    for number in ("--workers", "--batch-size", "--seq-len", "--batches"):
        parser.add_argument(number, type=int, required=True)
    options = parser.parse_args()
    # A module of kernels that imports triton.
    kernels = types.ModuleType("torchtitan.models.moe.kernels")
    kernels.generate_permute_indices = None  # type: ignore[attr-defined]
    sys.modules[kernels.__name__] = kernels
    from torchtitan.components.tokenizer import HuggingFaceTokenizer
    from torchtitan.config import JobConfig
    from torchtitan.hf_datasets.text_datasets import build_text_dataloader

    config = JobConfig()
    training = config.training
    training.dataset, training.dataset_path = options.dataset, options.path
    training.local_batch_size, training.seq_len = options.batch_size, options.seq_len
    training.dataloader.num_workers = options.workers
    loader = build_text_dataloader(1, 0, HuggingFaceTokenizer(options.tokenizer), config)
    batches = iter(loader)
    first = next(batches)[0]["input"]
    began, processor = time.perf_counter(), time.process_time()
    second = next(batches)[0]["input"]
    for _ in range(options.batches - 1):
        next(batches)
    tokens = options.batches * first.numel()
    found = {
        "speed": tokens / (time.perf_counter() - began),
        "processor": tokens / (time.process_time() - processor),
        "first": first[0].tolist(),
        "repeats": torch.equal(first, second),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
