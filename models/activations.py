"""What the forward of a model's modules keeps for the backward, as plain arithmetic: no torch.

Counted are the tensors that autograd saves and that do not belong to the parameters, each storage once. How many
there are depends on the kernels: accelerators have a fused RMSNorm that keeps its input, the CPU's is
composed of small operations and keeps an fp32 copy of its input and the normalised one as well.

Here are the modules that all families share; what a layer keeps stands beside each family's model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

FP32 = 4
_INT64 = 8


class Kernels(Enum):
    """Whose kernels run."""

    ACCELERATOR = "accelerator"  # fused norms, flash attention
    CPU = "cpu"  # composed norms, flash attention


@dataclass(frozen=True)
class Saved:
    """Of one module, bytes for each token of a microbatch.

    Attributes:
        input: its input, which is all that stays under activation checkpointing.
        inside: what else it saves.
        operations: what stays beside the input under checkpointing by operation: the results of attention and of
            every second matrix product. None: not known, at most `inside`.
        deferred: what stays from the gradient of the input to that of the weights, when these are separate:
            input and output gradient of every linear layer.
        temporary: the most that its own backward needs beside all that, for a moment.
        forward_temporary: the same of its forward.
        per_sequence: bytes for each position of a microbatch, whatever its number of sequences; modules of one
            stage share them.
        holds_input: whether the input itself is among what is kept, and not only a copy in another format.
        undivided: what of all this tensor parallelism does not divide: each rank of a group has it. None: nothing.
    """

    input: int = 0
    inside: int = 0
    operations: int | None = None
    deferred: int = 0
    temporary: int = 0
    forward_temporary: int = 0
    per_sequence: int = 0
    holds_input: bool = True
    undivided: Saved | None = None

    @property
    def common(self) -> Saved:
        """What is not divided, nothing included."""
        return Saved() if self.undivided is None else self.undivided

    def over(self, ranks: int) -> Saved:
        """What each of so many ranks of a tensor group keeps; `per_sequence` is not divided."""
        if ranks == 1:
            return self
        common = self.common

        def part(whole: int, undivided: int) -> int:
            return undivided + (whole - undivided) // ranks

        return replace(
            self,
            input=part(self.input, common.input),
            inside=part(self.inside, common.inside),
            operations=None if self.operations is None else part(self.operations, common.operations or 0),
            deferred=part(self.deferred, common.deferred),
            temporary=part(self.temporary, common.temporary),
            forward_temporary=part(self.forward_temporary, common.forward_temporary),
        )

    @property
    def whole(self) -> int:
        return self.input + self.inside


@dataclass(frozen=True)
class NormSaved:
    """What a norm keeps for each token, in bytes: its input, and what else."""

    input: int
    more: int


def norm_saved(dim: int, norm_type: str, element: int, kernels: Kernels) -> NormSaved:
    """Of a norm over `dim` features, numbers of `element` bytes.

    The fused RMSNorm keeps one fp32 statistic beside its input. The composed one keeps its input and the normalised
    input in fp32.
    """
    if norm_type != "rmsnorm":
        return NormSaved(element * dim, 2 * FP32)  # mean and deviation; fused everywhere
    if kernels is Kernels.ACCELERATOR:
        return NormSaved(element * dim, FP32)
    return NormSaved(FP32 * dim, FP32 * (dim + 1))


def embedding_saved() -> Saved:
    """Of the embedding: the tokens."""
    return Saved(input=_INT64, undivided=Saved(input=_INT64))


def last_norm_saved(dim: int, norm_type: str, element: int, kernels: Kernels) -> Saved:
    """Of the norm before the output."""
    norm = norm_saved(dim, norm_type, element, kernels)
    return Saved(input=norm.input, inside=norm.more, temporary=element * 2 * dim)


def output_saved(dim: int, vocab_size: int, element: int) -> Saved:
    """Of the output and the loss."""
    return Saved(
        input=element * dim,
        # log-softmax in fp32, and the labels
        inside=FP32 * vocab_size + _INT64,
        deferred=element * (dim + vocab_size),
        # The gradient of the log-softmax and that of its input, both in fp32.
        temporary=2 * FP32 * vocab_size,
        # The logits, and a copy of them in fp32 if they are not.
        forward_temporary=(element + (FP32 if element != FP32 else 0)) * vocab_size,
        undivided=Saved(input=element * dim, inside=_INT64, deferred=element * dim),
    )


def fused_output_saved(dim: int, vocab_size: int, element: int, chunks: float) -> Saved:
    """Of the output and the loss where only a part of a microbatch's logits, 1 / `chunks`, are there at a time.

    The gradient of the hidden states is made with the loss, and the hidden states themselves are not needed again.
    """
    # Logits and their copy in fp32, which becomes their gradient, and that in the compute format.
    at_a_time = (FP32 if element == FP32 else FP32 + element) * vocab_size
    work = int(at_a_time / chunks)
    return Saved(
        inside=element * dim,
        forward_temporary=element * dim + work,
        undivided=Saved(inside=element * dim, forward_temporary=element * dim),
    )
