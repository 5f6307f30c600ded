"""Validation: forwards alone, for any placement.

2 ranks, 2 stages each (rank 0 has stages 0 and 2), 4 microbatches:

    rank 0 | 0F0 0F1 2F0 2F1 0F2 0F3 2F2 2F3
    rank 1 |     1F0 1F1 3F0 3F1 1F2 1F3 3F2 3F3

Whenever a rank is free it runs, of what is there, the deepest stage first. That never waits without need and
keeps few results between stages alive. Whatever schedule trains, this one validates.
"""

from __future__ import annotations

import heapq

from parallelisms.pipeline.actions import Action, ActionLists, Kind
from parallelisms.pipeline.setting import Setting


def forward_only(setting: Setting) -> ActionLists:
    """The forwards of each rank, in the order of a greedy simulation with the setting's costs."""
    owners, costs = setting.placement.owners, setting.costs
    lists: list[list[Action]] = [[] for _ in range(setting.ranks)]
    # Of each rank: what has arrived, deepest stage first, and whether it is busy.
    arrived: list[list[tuple[int, int]]] = [[] for _ in range(setting.ranks)]
    arrived[owners[0]] = [(0, microbatch) for microbatch in range(setting.microbatches)]
    busy = [False] * setting.ranks
    # (time, 0 for the end of a forward or 1 for an arrival, stage, microbatch)
    events: list[tuple[float, int, int, int]] = []
    now = 0.0
    waking = {owners[0]}
    while waking or events:
        for rank in sorted(waking):
            if arrived[rank] and not busy[rank]:
                negative_stage, microbatch = heapq.heappop(arrived[rank])
                lists[rank].append(Action(-negative_stage, Kind.FORWARD, microbatch))
                busy[rank] = True
                end = now + costs.forward[-negative_stage]
                heapq.heappush(events, (end, 0, -negative_stage, microbatch))
        waking = set()
        # Everything of one moment happens before any rank chooses.
        while events and (not waking or events[0][0] == now):
            now, event, stage, microbatch = heapq.heappop(events)
            rank = owners[stage]
            waking.add(rank)
            if event == 1:
                heapq.heappush(arrived[rank], (-stage, microbatch))
                continue
            busy[rank] = False
            if stage + 1 < len(owners):
                away = owners[stage + 1] != rank
                heapq.heappush(events, (now + costs.transfer * away, 1, stage + 1, microbatch))
    return tuple(tuple(actions) for actions in lists)
