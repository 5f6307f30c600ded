"""Tokens per second of the trainer on one process against a bare loop on the same model, batch and optimizer.

    python benchmarks/trainer_overhead.py [--steps 40] [--threads 2]

The bare loop is what a textbook has: forward, cross-entropy, backward, clip, step. Both run in one process, a
step each in turn, so that the machine's moods hit both; the ratio is that of the medians of the steps. The goal
is 0.97 or more.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from models.initialize import initialize_parameters
from models.registry import configured_sizes, family
from trainer.build import build_pipeline
from trainer.config.schema import Config
from trainer.data.loader import Batch
from trainer.loop import Loop
from trainer.optimizer import build_lr_schedule, build_optimizer
from trainer.plan.plan import make_plan
from trainer.ports import free_port
from trainer.process import RankIdentity, RankProcess

_WARM_UP = 3  # steps that are not counted


class SameBatches:
    """Endless batches of random tokens, made beforehand."""

    def __init__(self, config: Config, vocab_size: int) -> None:
        shape = (8, config.training.batch_size, config.training.seq_len)
        self.tokens = torch.randint(0, vocab_size, shape)
        self.labels = torch.randint(0, vocab_size, shape)
        self.position = 0

    def __iter__(self) -> SameBatches:
        return self

    def __next__(self) -> Batch:
        self.position = (self.position + 1) % len(self.tokens)
        return Batch(self.tokens[self.position], self.labels[self.position])


def bare_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    logits = model(batch.tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    config = Config.model_validate(
        {"training": {"batch_size": 8, "seq_len": 256, "mixed_precision_param": "float32", "steps": 10**6}}
    )
    sizes = configured_sizes(config.model.name, config.model.flavor, config.model.norm_type, {})
    plan = make_plan(config, 1)
    bare = family(config.model.name).build(sizes)
    initialize_parameters(bare, config.training.seed)
    bare_optimizer = torch.optim.AdamW(bare.parameters(), lr=config.optimizer.lr, fused=True)
    batches = SameBatches(config, sizes.vocab_size)
    record = Path(tempfile.mkdtemp()) / "failure.json"
    with RankProcess(RankIdentity(0, 0, 1), config, plan, record) as process:
        pipeline = build_pipeline(config, plan, process, process.progress)
        optimizer = build_optimizer(pipeline.parts, config.optimizer, process.device)
        schedule = build_lr_schedule(optimizer, config)
        loop = Loop(config, plan, pipeline, optimizer, schedule, batches, process.device, process.progress)
        ours, theirs = [], []
        for _ in range(options.steps + _WARM_UP):
            start = time.perf_counter()
            bare_step(bare, bare_optimizer, next(batches))
            middle = time.perf_counter()
            loop.train_step()
            theirs.append(middle - start)
            ours.append(time.perf_counter() - middle)
    slow, fast = statistics.median(ours[_WARM_UP:]), statistics.median(theirs[_WARM_UP:])
    tokens = plan.tokens_per_step
    print(
        f"bare loop {tokens / fast:,.0f} tokens/s, trainer {tokens / slow:,.0f} tokens/s, ratio {fast / slow:.3f}"
    )


if __name__ == "__main__":
    main()
