"""Bytes that a context rank sends to the others in a step, for attention.

Of n ranks, each with t tokens of a sequence: gathering sends a rank's own keys and values to n - 1 others, in the
forward and again in the backward, and the fp32 gradients of theirs to each of them. A ring passes as many keys and
values on, and gradients once more than that, so that they come home. By heads, queries, keys, values and the result
change places, of which each rank keeps one part in n. Collectives are counted as their ring algorithms.
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
    queries_and_results: int
    kv_heads: int


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
            # Each head of keys and values goes to as many ranks as it takes to give each rank one.
            copies = -(-ranks // numbers.kv_heads)
            moved = numbers.queries_and_results + copies * numbers.keys_and_values
            return moved * element * others / ranks, moved * element * others / ranks


def _numbers(plan: Plan) -> _PerToken:
    """From the heads of the sizes; a family that does not name any counts as one with as many features as its state."""
    sizes, tensor = plan.sizes, plan.layout.tensor
    heads = getattr(sizes, "n_heads", 1)
    kv_heads = getattr(sizes, "n_kv_heads", heads)
    width = getattr(sizes, "head_dim", sizes.dim // heads)
    both = width + getattr(sizes, "v_head_dim", width)
    of_rank = max(1, kv_heads // tensor)
    return _PerToken(of_rank * both, heads // tensor * both, of_rank)
