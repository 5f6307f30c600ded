"""Validation: forwards alone, for any placement.

2 ranks, 2 stages each (rank 0 has stages 0 and 2), 4 microbatches:

    rank 0 | 0F0 0F1 2F0 2F1 0F2 0F3 2F2 2F3
    rank 1 |     1F0 1F1 3F0 3F1 1F2 1F3 3F2 3F3

Whenever a rank is free it runs the first of what is there, in the order of interleaved 1F1B: by groups of
about p microbatches, in a group by stages, in a stage by microbatches. A rank never waits while there is
something to do, and few results between stages are alive. Whatever schedule trains, this one validates.
"""

from __future__ import annotations

import heapq

from parallelisms.pipeline.actions import Action, ActionLists, Kind
from parallelisms.pipeline.schedules.interleaved import equal_groups
from parallelisms.pipeline.setting import Setting


def forward_only(setting: Setting) -> ActionLists:
    """The forwards of each rank, in the order of a greedy simulation with the setting's costs."""
    groups = equal_groups(setting.microbatches, max(1, setting.microbatches // setting.ranks))
    group_of = [number for number, group in enumerate(groups) for _ in group]
    owners, costs = setting.placement.owners, setting.costs
    lists: list[list[Action]] = [[] for _ in range(setting.ranks)]
    # Of each rank: what has arrived, as (group, stage, microbatch), and whether it is busy.
    arrived: list[list[tuple[int, int, int]]] = [[] for _ in range(setting.ranks)]
    arrived[owners[0]] = [(group_of[each], 0, each) for each in range(setting.microbatches)]
    busy = [False] * setting.ranks
    # (time, whether it is an arrival or else the end of a forward, stage, microbatch)
    events: list[tuple[float, bool, int, int]] = []
    now, waking = 0.0, {owners[0]}
    while waking:
        for rank in sorted(waking):
            if arrived[rank] and not busy[rank]:
                _, stage, microbatch = heapq.heappop(arrived[rank])
                lists[rank].append(Action(stage, Kind.FORWARD, microbatch))
                busy[rank] = True
                heapq.heappush(events, (now + costs.forward[stage], False, stage, microbatch))
        waking = set()
        # Everything of one moment happens before any rank chooses.
        while events and (not waking or events[0][0] == now):
            now, is_arrival, stage, microbatch = heapq.heappop(events)
            rank = owners[stage]
            waking.add(rank)
            if is_arrival:
                heapq.heappush(arrived[rank], (group_of[microbatch], stage, microbatch))
                continue
            busy[rank] = False
            if stage + 1 < len(owners):
                way = costs.transfer if owners[stage + 1] != rank else 0.0
                heapq.heappush(events, (now + way, True, stage + 1, microbatch))
    return tuple(tuple(actions) for actions in lists)
