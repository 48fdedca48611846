"""DistFlashAttn: a causal triangle of shards in half the stages of a ring, because idle ranks help.

Paper: Li et al., "DistFlashAttn: Distributed Memory-efficient Attention for Long-context LLMs Training" (2023, first
called LightSeq), §3.1, the load-balanced schedule. Every rank starts with its own block (p, p). At step
t = 1 … ⌊N/2⌋ rank p ≥ t computes (p, p - t) with KV fetched from p - t; a rank p < t would be idle, and computes
(p + N - t, p) for a late rank: the query comes to it, the output goes home.
Cost: ⌊N/2⌋ + 1 stages; a rank receives at most ⌊N/2⌋ shards of KV or q and sends back at most ⌊N/2⌋ of o. It takes the
packed sequence for one document: on packs of short documents most blocks are empty and the rest are where they fall.
Ours: blocks without a visible pair don't exist and nothing travels for them. For even N the last step covers its
distance once, by the helpers (early ranks take q from late ranks, as in HSAP's Figure 3). A mask with blocks above the
diagonal leaves no rank idle: there every rank computes its own queries, the KV of distance t at step t.
"""

from __future__ import annotations

import numpy as np

from hsap.ir.block import Blocks, Shards
from hsap.ir.problem import Problem
from hsap.ir.schedule import Schedule, Strategy
from hsap.planners.parts import equal_shards, same_both_ways


def distflash(problem: Problem) -> Strategy:
    """Plan contiguous shards as one balanced causal triangle."""
    num_ranks = problem.topology.inter_sp
    shards = equal_shards(problem.layout.num_tokens, num_ranks)
    return same_both_ways(problem, shards, lambda blocks: _schedule(blocks, shards, num_ranks))


def help_early(distance: np.ndarray, num_ranks: np.ndarray | int) -> tuple[np.ndarray, np.ndarray]:
    """Balance a causal triangle of `num_ranks` shards: (whether KV's rank helps, step), per block below the diagonal.

    distance: query's rank - KV's rank, in [0, num_ranks), num_ranks >= 1; distance 0 is step 0, at home.
    """
    helps = 2 * distance >= num_ranks
    return helps, np.where(helps, num_ranks - distance, distance)


def _schedule(blocks: Blocks, shards: Shards, num_ranks: int) -> Schedule:
    q_rank, kv_rank = shards.home[blocks.q], shards.home[blocks.kv]
    if (q_rank < kv_rank).any():
        return Schedule.of(blocks, q_rank, (q_rank - kv_rank) % num_ranks)
    helps, step = help_early(q_rank - kv_rank, num_ranks)
    return Schedule.of(blocks, np.where(helps, kv_rank, q_rank), step)
