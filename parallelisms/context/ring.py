"""Context parallelism by a ring: keys and values go from rank to rank, and no rank ever holds all of them.

Liu et al. 2023, Ring Attention with Blockwise Transformers (arXiv 2310.01889). In step s a rank computes with the
keys and values of the rank s places before it, while those of the next step are on their way; partial results are
added up by their log-sum-exp. The backward goes round once more, with the gradients of keys and values behind them:
each rank adds what its queries contribute, and after a whole round they are with their owner. Keys and values that
nothing of a rank sees are passed on unused.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from parallelisms.context.kernels import Gradients, Partial
from parallelisms.context.span import BackwardSum, Group, KeysAndValues, Span, Sum


def ring_forward(span: Span, q: Tensor, k: Tensor, v: Tensor) -> Partial:
    """Attention of this rank's queries (B, H, t, D) over all keys, of which it has k (B, KV, t, D) and v
    (B, KV, t, E). Collective over the group."""
    group = span.group
    total = Sum(span, q, v.shape[-1])
    visiting = KeysAndValues.of(k, v)
    for step in range(group.size):
        coming = _pass_on(group, visiting) if step < group.size - 1 else None
        total.add(span.tokens_of(_owner(group, step)), visiting.k, visiting.v)
        if coming is not None:
            visiting = coming.wait()
    return total.result()


def ring_backward(span: Span, q: Tensor, k: Tensor, v: Tensor, whole: Partial, gradient: Tensor) -> Gradients:
    """Gradients in fp32, from that of the output, (B, H, t, E). Collective over the group."""
    group = span.group
    total = BackwardSum(span, q, whole, gradient)
    visiting = KeysAndValues.of(k, v)
    travelling: _Passing | None = None
    for step in range(group.size):
        coming = _pass_on(group, visiting) if step < group.size - 1 else None
        tokens = span.tokens_of(_owner(group, step))
        contributions = list(total.contributions(tokens, visiting.k, visiting.v))
        # Only now: while these were computed, the gradients of the same keys came from the rank before.
        if travelling is None:
            summed = visiting.like(torch.zeros_like(visiting.buffer, dtype=torch.float32))
        else:
            summed = travelling.wait()
        for contribution in contributions:
            summed.add(contribution)
        travelling = _pass_on(group, summed)
        if coming is not None:
            visiting = coming.wait()
    assert travelling is not None
    own = travelling.wait()
    return Gradients(total.q, own.k, own.v)


class _Passing:
    """A message to the next rank of the ring and one from the rank before, both on their way."""

    def __init__(self, sent: KeysAndValues, received: KeysAndValues, works: list[dist.Work]) -> None:
        self._sent = sent  # must live until it is sent
        self._received = received
        self._works = works

    def wait(self) -> KeysAndValues:
        """What came from the rank before."""
        for work in self._works:
            work.wait()
        return self._received


def _pass_on(group: Group, own: KeysAndValues) -> _Passing:
    """Start to give this to the next rank and to take the same of the rank before.

    Messages of two ranks arrive in the order in which they were posted, and all ranks post the same ones in the same
    order, so keys and gradients do not get mixed up.
    """
    received = own.like(torch.empty_like(own.buffer))
    resolve = torch._C._distributed_c10d._resolve_process_group
    process_group = resolve(group.collective.name)  # type: ignore[arg-type]
    following, preceding = (
        dist.get_global_rank(process_group, (group.rank + shift) % group.size) for shift in (1, -1)
    )
    operations = [
        dist.P2POp(dist.isend, own.buffer, following, process_group),
        dist.P2POp(dist.irecv, received.buffer, preceding, process_group),
    ]
    return _Passing(own, received, dist.batch_isend_irecv(operations))


def _owner(group: Group, step: int) -> int:
    """Whose keys and values are here in this step."""
    return (group.rank - step) % group.size
