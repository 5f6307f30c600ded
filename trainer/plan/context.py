"""What attention over context ranks costs beside the arithmetic: bytes sent, room for what others send, waiting.

Of n ranks, each with t tokens of a sequence: gathering sends a rank's own keys and values to n - 1 others, in the
forward and again in the backward, and the fp32 gradients of theirs to each of them. A ring passes as many keys and
values on, and gradients once more than that, so that they come home. By heads, queries, keys, values and the result
change places, of which each rank keeps one part in n. Collectives are counted as their ring algorithms.

What arrives is not kept for the backward; there is room for it in one layer at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parallelisms.pipeline.split import is_layer
from trainer.plan.formats import STATE_BYTES, Recomputed, recomputed

if TYPE_CHECKING:
    from trainer.plan.plan import Plan


@dataclass(frozen=True)
class ContextTraffic:
    """Bytes sent in the forwards and in the backwards of a step; what is computed again counts in the backwards."""

    forward: int = 0
    backward: int = 0

    @property
    def total(self) -> int:
        return self.forward + self.backward


@dataclass(frozen=True)
class _PerToken:
    """Numbers of one token in one layer of a tensor rank."""

    keys_and_values: int
    queries: int
    results: int
    kv_heads: int


@dataclass(frozen=True)
class ContextBuffers:
    """Bytes of one sequence that attention has beside what is kept, at the most, in a forward and in a backward."""

    forward: int = 0
    backward: int = 0


def context_traffic(plan: Plan, modules: Sequence[str]) -> ContextTraffic:
    """By the stage of these modules. Nothing without context parallelism."""
    if plan.layout.context == 1:
        return ContextTraffic()
    layers = [module for module in modules if is_layer(module)]
    again = sum(recomputed(layer, plan.parallelism) is Recomputed.ALL for layer in layers)
    tokens = sum(plan.rows) * plan.rank_seq_len * plan.accumulation
    forward, backward = _of_a_token(plan)
    return ContextTraffic(
        forward=int(len(layers) * tokens * forward),
        backward=int(tokens * (len(layers) * backward + again * forward)),
    )


def context_buffers(plan: Plan) -> ContextBuffers:
    """Of any layer; nothing without context parallelism. Without the mask of a block, where there is one.

    Results and gradients are added up in fp32, beside those of one block in the format of the model.
    """
    if plan.layout.context == 1:
        return ContextBuffers()
    ranks, element, numbers = plan.layout.context, plan.formats.compute_bytes, _numbers(plan)
    kv, added = numbers.keys_and_values, STATE_BYTES + element
    match plan.parallelism.rotate_method:
        case "allgather":
            arriving = (2 * ranks + 1) * kv * element  # as they come, in their order, and the rank's own
            forward = max(arriving, ranks * kv * element + numbers.results * added)
            backward = ranks * kv * (added + element) + numbers.queries * added
        case "alltoall":
            forward = 2 * kv * element + numbers.results * added
            backward = 3 * kv * element + 2 * kv * STATE_BYTES + numbers.queries * added
        case "ulysses":
            copied = _copies(plan) * kv
            exchanged = 2 * max(numbers.queries, numbers.results)  # what is sent and what comes
            forward = backward = (exchanged + numbers.queries + numbers.results + copied) * element
    return ContextBuffers(forward * plan.rank_seq_len, backward * plan.rank_seq_len)


def unevenness(plan: Plan) -> float:
    """The work of the busiest context rank in attention, over the mean: 1 where it is balanced.

    Of the last of n contiguous parts, whose tokens see all of the others and on the mean half of its own.
    """
    even = plan.parallelism.balanced_context or plan.parallelism.rotate_method == "ulysses"
    return 1.0 if even else 2.0 - 1.0 / plan.layout.context


def _of_a_token(plan: Plan) -> tuple[float, float]:
    """Bytes for one of the rank's own tokens in one layer: in its forward and in its backward."""
    ranks, element = plan.layout.context, plan.formats.compute_bytes
    numbers = _numbers(plan)
    others = ranks - 1
    match plan.parallelism.rotate_method:
        case "allgather":
            once = others * numbers.keys_and_values
            return once * element, once * (element + STATE_BYTES)
        case "alltoall":
            once = others * numbers.keys_and_values
            home = ranks * numbers.keys_and_values
            return once * element, once * element + home * STATE_BYTES
        case "ulysses":
            moved = numbers.queries + numbers.results + _copies(plan) * numbers.keys_and_values
            return moved * element * others / ranks, moved * element * others / ranks


def _copies(plan: Plan) -> int:
    """By heads, how often each of keys and values is sent, so that every rank has one."""
    return -(-plan.layout.context // _numbers(plan).kv_heads)


def _numbers(plan: Plan) -> _PerToken:
    """From the heads of the sizes; a family that does not name any counts as one with as many features as its state."""
    sizes, tensor = plan.sizes, plan.layout.tensor
    heads = getattr(sizes, "n_heads", 1)
    kv_heads = getattr(sizes, "n_kv_heads", heads)
    width = getattr(sizes, "head_dim", sizes.dim // heads)
    value_width = getattr(sizes, "v_head_dim", width)
    of_rank, queries = max(1, kv_heads // tensor), heads // tensor
    return _PerToken(of_rank * (width + value_width), queries * width, queries * value_width, of_rank)
