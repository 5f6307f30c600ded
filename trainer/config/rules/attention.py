"""Rules of [model] attention."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config.machine import Machine, this_machine
from trainer.config.report import Problem
from trainer.config.rules.model import sizes_of
from trainer.config.schema import Config

_WINDOW = "model.override.sliding_window"


def attention_kernel_spans_context_ranks(config: Config, _world_size: int | None) -> Iterator[Problem]:
    """Context ranks that hold parts of each other's sequences have a kernel of their own, but for ulysses."""
    kernel, experimental = config.model.attention, config.experimental
    method = experimental.context_parallel_rotate_method
    if experimental.context_parallel_degree > 1 and method != "ulysses" and kernel in ("flash", "flex"):
        yield Problem(
            ("model.attention", "experimental.context_parallel_rotate_method"),
            f"context parallelism by {method} has a kernel of its own",
            'auto or sdpa, or experimental.context_parallel_rotate_method = "ulysses"',
            "auto",
        )


def attention_kernel_suits_the_device(config: Config, machine: Machine | None = None) -> Iterator[Problem]:
    """Flex attention has no gradients on a processor, flash attention no masks there, and elsewhere one format.

    `machine` is for tests; without it, this one.
    """
    kernel, on_gpus = config.model.attention, (machine or this_machine()).gpus > 0
    if kernel == "flex" and not on_gpus:
        yield Problem(("model.attention",), "has no gradients without an accelerator", "auto or sdpa", "auto")
    for key, is_masked in (
        ("data.mask_documents", config.data.mask_documents),
        (_WINDOW, _has_window(config)),
    ):
        if kernel == "flash" and not on_gpus and is_masked:
            message = f"has no kernel for {key} without an accelerator"
            yield Problem(("model.attention", key), message, "auto or sdpa", "auto")
    if kernel == "flash" and on_gpus and config.training.mixed_precision_param != "bfloat16":
        yield Problem(
            ("model.attention", "training.mixed_precision_param"),
            "computes in bfloat16 only",
            'auto or sdpa, or training.mixed_precision_param = "bfloat16"',
            "auto",
        )


def _has_window(config: Config) -> bool:
    return getattr(sizes_of(config), "sliding_window", None) is not None
