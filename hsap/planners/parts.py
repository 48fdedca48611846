"""What several planners share: common ways to cut a batch into shards, and one schedule for every mask."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hsap.ir.block import Blocks, Shards, cut_blocks
from hsap.ir.problem import Problem
from hsap.ir.schedule import Schedule, Strategy


def equal_shards(num_tokens: int, num_ranks: int) -> Shards:
    """Cut the packed sequence into one contiguous shard per rank, equal ± 1 token."""
    borders = num_tokens * np.arange(num_ranks + 1) // num_ranks
    return Shards.of([(rank, np.array([borders[rank : rank + 2]])) for rank in range(num_ranks)])


def same_both_ways(problem: Problem, shards: Shards, schedule: Callable[[Blocks], Schedule]) -> Strategy:
    """Make the strategy whose backward computes every block where and when the forward does."""
    schedules = tuple(schedule(cut_blocks(shards, problem.slices(mask))) for mask in range(len(problem.masks)))
    return Strategy(shards, schedules, schedules)
