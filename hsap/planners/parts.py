"""What several planners share: ways to cut a batch into shards, to shape a group, and one schedule for every mask."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from hsap.ir.block import Blocks, Shards, cut_blocks
from hsap.ir.check import whole
from hsap.ir.problem import Problem, Topology
from hsap.ir.schedule import Schedule, Strategy


def equal_shards(num_tokens: int, num_ranks: int) -> Shards:
    """Cut the packed sequence into one contiguous shard per rank, equal ± 1 token."""
    borders = num_tokens * np.arange(num_ranks + 1) // num_ranks
    return Shards.of([(rank, np.array([borders[rank : rank + 2]])) for rank in range(num_ranks)])


def same_both_ways(problem: Problem, shards: Shards, schedule: Callable[[Blocks], Schedule]) -> Strategy:
    """Make the strategy whose backward computes every block where and when the forward does."""
    schedules = tuple(schedule(cut_blocks(shards, problem.slices(mask))) for mask in range(len(problem.masks)))
    return Strategy(shards, schedules, schedules)


def head_parallel(planner: str, problem: Problem, heads: int | None) -> Problem:
    """Give the same problem with its ranks shaped for head parallelism: `heads` neighbours share a sequence's heads.

    heads: None takes a given IntraSP as it is; at intra_sp = 1 as many neighbours as there are KV heads, as far as they
    divide KV heads, the ranks and a node, so that a share is whole KV heads and no all-to-all leaves its node.
    ValueError: heads that don't divide the ranks, or more than there are query heads.
    """
    num_ranks, cluster = problem.num_ranks, problem.cluster
    if heads is not None:
        heads = whole(f"planner {planner}: heads, the ranks that share a sequence's heads,", heads)
        if num_ranks % heads:
            legal = ", ".join(str(d) for d in range(1, num_ranks + 1) if num_ranks % d == 0)
            raise ValueError(
                f"planner {planner}: heads={heads} doesn't divide the {num_ranks} ranks; choose of {legal}"
            )
    elif problem.topology.intra_sp > 1:
        heads = problem.topology.intra_sp
    else:
        heads = math.gcd(problem.heads.num_kv_heads, num_ranks, cluster.ranks_per_node, cluster.first_rank)
    return replace(problem, topology=Topology(num_ranks // heads, heads))
