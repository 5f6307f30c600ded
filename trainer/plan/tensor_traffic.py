"""Bytes that a rank of a tensor group sends to the others in a step: hidden states between and within blocks.

Each block gathers what it gets and scatters the sum of what it gives, and its backward does the reverse of both; so do
embedding and output (see `parallelisms.tensor`). Whoever computes a layer again exchanges again, but for the layer's
own result. Collectives are counted as their ring algorithms: of gathering and of scattering a sum each rank sends
(n - 1)/n of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from models.tied import held_shapes
from parallelisms.pipeline.split import is_layer
from parallelisms.tensor_plan import cut_dimension, features_into_attention, kv_heads
from trainer.plan.formats import STATE_BYTES, Recomputed, recomputed

if TYPE_CHECKING:
    from trainer.plan.plan import Plan


def tensor_traffic(plan: Plan, modules: Sequence[str]) -> int:
    """By the stage of these modules. 0 without tensor parallelism."""
    ranks = plan.layout.tensor
    if ranks == 1:
        return 0
    element = plan.formats.compute_bytes
    tokens = sum(plan.rows) * plan.rank_seq_len * plan.accumulation
    whole = sum(_features(plan, module) * element + _others(plan, module) for module in modules) * tokens
    return whole * (ranks - 1) // ranks + _whole_gradients(plan, modules)


def _features(plan: Plan, module: str) -> int:
    """Numbers for each token that a module exchanges, forwards and backwards."""
    dim = plan.sizes.dim
    if not is_layer(module):
        return 0 if module == "norm" else 2 * dim
    once = features_into_attention(plan.sizes) + 3 * dim
    again = 0 if recomputed(module, plan.parallelism) is Recomputed.NOTHING else once - dim
    return 2 * once + again


def _others(plan: Plan, module: str) -> int:
    """Bytes for each token of the loss: two fp32 numbers of every rank, or all logits."""
    if module != "output":
        return 0
    if plan.parallelism.loss_parallel:
        return 2 * STATE_BYTES * plan.layout.tensor
    return int(plan.sizes.vocab_size) * plan.formats.compute_bytes


def _whole_gradients(plan: Plan, modules: Sequence[str]) -> int:
    """An all-reduce of the gradients of parameters that are not divided, after data parallelism's reduction."""
    ranks, shard, heads = plan.layout.tensor, plan.layout.sharding_ranks, kv_heads(plan.sizes)
    numbers = 0
    for name, shape in held_shapes(plan.sizes, modules).items():
        if cut_dimension(name, ranks, heads) is None:
            rows = -(-shape[0] // shard)
            for size in shape[1:]:
                rows *= size
            numbers += rows
    return 2 * (ranks - 1) * numbers * STATE_BYTES // ranks
