"""Lower bounds on the wall clock of a step, and the closed formulas of the schedules that have one.

p ranks, v stages per rank, m microbatches; f, b, w are the times of one rank's whole share of one microbatch.
"""

from __future__ import annotations

from itertools import accumulate

from parallelisms.pipeline.setting import Costs, Placement


def lower_bound(
    placement: Placement,
    costs: Costs,
    microbatches: int,
    splits_backward: bool = False,
    forward_only: bool = False,
) -> float:
    """No order of the actions makes the step shorter than this, whatever the memory.

    For every rank and every run of its stages from some stage s on: the first microbatch has to reach s; then
    the rank has all their work to do, for every microbatch; then the last gradient has to travel from there
    to stage 0. With a split backward the weight gradients may fill that last stretch, so that two bounds
    stand beside each other: without weight gradients but with the way back (at whose end each stage passed
    still owes its own), and with them but without the way back.

    For equal stages on a looped placement this is `unsplit_bound`, and with one stage per rank `split_bound`.
    """
    if forward_only:
        return _forward_bound(placement, costs, microbatches)
    reach = _travel(placement, costs.forward, costs.transfer)
    back = _travel(placement, costs.backward_input, costs.transfer)
    both = [b + w for b, w in zip(costs.backward_input, costs.backward_weight, strict=True)]
    back_whole = _travel(placement, both, costs.transfer)
    bound = 0.0
    for rank in range(placement.ranks):
        chain = weights = 0.0
        for stage in reversed(placement.stages_of(rank)):
            chain += microbatches * (costs.forward[stage] + costs.backward_input[stage])
            weights += microbatches * costs.backward_weight[stage]
            if splits_backward:
                # The last input gradient of every stage passed is followed by its weight gradient.
                tail = max(back[stage] - back[k] + costs.backward_weight[k] for k in range(stage + 1))
                bound = max(bound, reach[stage] + chain + tail, reach[stage] + chain + weights)
            else:
                bound = max(bound, reach[stage] + chain + weights + back_whole[stage])
    return bound


def _forward_bound(placement: Placement, costs: Costs, microbatches: int) -> float:
    reach = _travel(placement, costs.forward, costs.transfer)
    last = placement.stages - 1
    bound = 0.0
    for rank in range(placement.ranks):
        stages = placement.stages_of(rank)
        for start in range(len(stages)):
            work = 0.0
            for stage in stages[start:]:
                work += microbatches * costs.forward[stage]
                rest = reach[last] + costs.forward[last] - reach[stage] - costs.forward[stage]
                bound = max(bound, reach[stages[start]] + work + rest)
    return bound


def _travel(placement: Placement, each: tuple[float, ...] | list[float], transfer: float) -> list[float]:
    """For every stage: the time that one microbatch spends on the stages before it and on the way to it."""
    owners = placement.owners
    hops = [
        cost + (transfer if owners[stage] != owners[stage + 1] else 0.0)
        for stage, cost in enumerate(each[:-1])
    ]
    return list(accumulate(hops, initial=0.0))


def unsplit_bound(
    ranks: int, stages_per_rank: int, microbatches: int, forward: float = 1.0, backward: float = 2.0
) -> float:
    """(f + B) * (max(m, p) + (min(m, p) - 1)/v): equal stages, looped, the backward in one go."""
    longer, shorter = max(microbatches, ranks), min(microbatches, ranks)
    return (forward + backward) * (longer + (shorter - 1) / stages_per_rank)


def split_bound(
    ranks: int,
    microbatches: int,
    forward: float = 1.0,
    backward_input: float = 1.0,
    backward_weight: float = 1.0,
) -> float:
    """max((p-1)f + m(f+b+w), (p+m-1)(f+b) + w): equal stages, one per rank, the backward in two parts."""
    work = microbatches * (forward + backward_input + backward_weight)
    chain = (ranks + microbatches - 1) * (forward + backward_input) + backward_weight
    return max((ranks - 1) * forward + work, chain)
