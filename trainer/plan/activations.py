"""Bytes that one stage holds of one microbatch between its forward and the end of its backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from models.activations import Kernels, Saved, fused_output_saved
from models.sizes import Sizes
from parallelisms.layout import Parallelism
from parallelisms.pipeline.split import is_layer
from trainer.plan.formats import Formats, Recomputed, recomputed


@dataclass(frozen=True)
class StageActivations:
    """Bytes of one stage, each for one sequence of a microbatch unless said.

    Attributes:
        held: from the forward to the backward, the stage's input included.
        held_once: the same for each microbatch whatever its number of sequences.
        deferred: from the gradient of the input to that of the weights.
        temporary: the most that the backward needs beside that; a recomputed layer is in it.
        layer_temporary: the same of its layers alone, without the loss.
        forward_temporary: the same of the forward.
        boundary: a hidden state between two stages, or its gradient.
    """

    held: int
    held_once: int
    deferred: int
    temporary: int
    layer_temporary: int
    forward_temporary: int
    boundary: int

    def held_of(self, rows: int) -> int:
        """What a microbatch of `rows` sequences holds."""
        return self.held * rows + self.held_once

    def at_least(self, forward: int, backward: int) -> StageActivations:
        """The same where attention needs so many bytes for a moment, beside which no other part of a layer works."""
        return replace(
            self,
            temporary=max(self.temporary, backward),
            layer_temporary=max(self.layer_temporary, backward),
            forward_temporary=max(self.forward_temporary, forward),
        )

    def masked(self, mask: int) -> StageActivations:
        """The same with a mask of so many bytes that all sequences share."""
        return replace(self, held_once=self.held_once + mask)

    def packed(self, mask: int) -> StageActivations:
        """The same where every sequence has positions of its own, and a mask of so many bytes."""
        return replace(self, held=self.held + self.held_once + mask, held_once=0)


def stage_activations(
    sizes: Sizes,
    modules: Sequence[str],
    *,
    first: bool,
    seq_len: int,
    formats: Formats,
    parallelism: Parallelism,
    kernels: Kernels,
    tensor: int = 1,
    loss_chunk: int | None = None,
    rows: int = 1,
) -> StageActivations:
    """What a rank of a stage of these modules holds.

    Args:
        sizes: of the model.
        modules: of the stage.
        first: whether it gets tokens and not hidden states.
        seq_len: tokens of a sequence, or of a context rank's part of it.
        formats: of numbers.
        parallelism: what is applied.
        kernels: whose kernels run.
        tensor: ranks of a tensor group.
        loss_chunk: tokens whose logits there are at a time; None: those of a whole microbatch.
        rows: sequences of a microbatch.
    """
    element = formats.compute_bytes
    kinds: dict[str, Saved] = {}
    held = deferred = temporary = layer_temporary = forward_temporary = once = 0
    for position, module in enumerate(modules):
        again = recomputed(module, parallelism)
        kind = sizes.kind(module)
        if kind not in kinds:
            kinds[kind] = _saved(sizes, module, element, kernels, loss_chunk, rows * seq_len).over(tensor)
        saved = kinds[kind]
        held += saved.whole if again is Recomputed.NOTHING else saved.input
        if again is Recomputed.OPERATIONS:
            held += saved.inside if saved.operations is None else saved.operations
        if position == 0 and not first and again is Recomputed.NOTHING and not saved.holds_input:
            held += element * sizes.dim // tensor
        deferred += saved.deferred
        needed = saved.temporary + (0 if again is Recomputed.NOTHING else saved.inside)
        temporary = max(temporary, needed)
        if is_layer(module):
            layer_temporary = max(layer_temporary, needed)
        forward_temporary = max(forward_temporary, saved.forward_temporary)
        once = max(once, saved.per_sequence)
    return StageActivations(
        held=held * seq_len,
        held_once=once * seq_len,
        deferred=deferred * seq_len,
        temporary=temporary * seq_len,
        layer_temporary=layer_temporary * seq_len,
        forward_temporary=forward_temporary * seq_len,
        boundary=element * sizes.dim * seq_len // tensor,
    )


def _saved(
    sizes: Sizes, module: str, element: int, kernels: Kernels, loss_chunk: int | None, tokens: int
) -> Saved:
    if module == "output" and loss_chunk is not None:
        chunks = -(-tokens // loss_chunk)
        return fused_output_saved(sizes.dim, sizes.vocab_size, element, chunks)
    return sizes.saved(module, element, kernels)
