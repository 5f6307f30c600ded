"""What a kernel of attention cannot do is refused by name, and what it can do is not."""

from __future__ import annotations

import pytest

from tests.config.reports import config_of, report_of, rules_broken
from trainer.config.machine import Machine
from trainer.config.rules.attention import attention_kernel_suits_the_device

LAPTOP = Machine(gpus=0, memory=32 << 30, cores=8)
SERVER = Machine(gpus=8, memory=32 << 30, cores=8)

KERNEL = "--model.attention"
MASKED = ("--data.mask_documents", "true")
WINDOW = ("--model.override.sliding_window", "4")
FP32 = ("--training.mixed_precision_param", "float32")
CONTEXT = ("--experimental.context_parallel_degree", "2")
METHOD = "--experimental.context_parallel_rotate_method"


@pytest.mark.parametrize(
    ("machine", "arguments", "says"),
    [
        (LAPTOP, (KERNEL, "flex"), "has no gradients without an accelerator; allowed: auto or sdpa"),
        (LAPTOP, (KERNEL, "flash", *MASKED), "has no kernel for data.mask_documents without an accelerator"),
        (LAPTOP, (KERNEL, "flash", *WINDOW), "has no kernel for model.override.sliding_window without"),
        (SERVER, (KERNEL, "flash", *FP32), "computes in bfloat16 only"),
    ],
)
def test_a_kernel_that_the_device_does_not_have_is_refused(
    machine: Machine, arguments: tuple[str, ...], says: str
) -> None:
    (problem,) = attention_kernel_suits_the_device(config_of(*arguments), machine)
    assert says in problem.line({})


@pytest.mark.parametrize(
    ("machine", "arguments"),
    [
        (LAPTOP, MASKED),
        (LAPTOP, (KERNEL, "sdpa", *MASKED)),
        (LAPTOP, (KERNEL, "flash", *FP32)),
        (LAPTOP, (*WINDOW, *MASKED)),
        (SERVER, (KERNEL, "flex", *MASKED, *FP32)),
        (SERVER, (KERNEL, "flash", *MASKED, "--training.mixed_precision_param", "bfloat16")),
        (SERVER, (KERNEL, "sdpa", *FP32)),
    ],
)
def test_a_kernel_that_the_device_has_passes(machine: Machine, arguments: tuple[str, ...]) -> None:
    assert list(attention_kernel_suits_the_device(config_of(*arguments), machine)) == []


@pytest.mark.parametrize("kernel", ["flash", "flex"])
def test_context_parallelism_takes_other_kernels_only_where_ranks_exchange_heads(kernel: str) -> None:
    (message,) = rules_broken(KERNEL, kernel, *CONTEXT, METHOD, "allgather")
    assert "context parallelism by allgather has a kernel of its own; allowed: auto or sdpa, or" in message
    assert rules_broken(KERNEL, kernel, *CONTEXT, METHOD, "ulysses") == []
    assert rules_broken(KERNEL, "sdpa", *CONTEXT, METHOD, "alltoall") == []
    assert rules_broken(KERNEL, kernel) == []


def test_a_kernel_that_nobody_has_is_refused_with_those_there_are() -> None:
    assert 'did you mean "flash"' in report_of(KERNEL, "flashy")
