"""Ring attention: KV shards travel a ring, one hop a stage, past queries that stay at home.

Paper: Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context" (2023), §3.
Cost: every rank receives all other ranks' KV, whatever the mask needs: (N - 1) · L / N rows a rank; with causal masks
and contiguous shards the last rank computes twice the mean.
Ours: blocks without a visible pair are not computed; in backward the KV gradients go straight home instead of
travelling on with the KV, which moves the same bytes.
"""

from __future__ import annotations

import numpy as np

from hsap.ir.block import Blocks, Shards
from hsap.ir.problem import Problem
from hsap.ir.program import Role
from hsap.ir.schedule import Schedule, Strategy, Transfers
from hsap.planners.parts import equal_shards, same_both_ways


def ring(problem: Problem) -> Strategy:
    """Plan contiguous shards whose KV goes once around."""
    num_ranks = problem.topology.inter_sp
    shards = equal_shards(problem.layout.num_tokens, num_ranks)
    return same_both_ways(problem, shards, lambda blocks: around(blocks, shards, num_ranks))


def around(blocks: Blocks, shards: Shards, num_ranks: int, inner: int | None = None) -> Schedule:
    """Schedule one shard a rank so that KV of rank r is at rank r + s in stage s.

    inner: a divisor of num_ranks makes two rings of one: KV goes around `inner` neighbours, then on to the next ones.
    """
    inner = inner or num_ranks
    rank, kv = shards.home[blocks.q], shards.home[blocks.kv]
    stage = (rank // inner - kv // inner) % (num_ranks // inner) * inner + (rank - kv) % inner
    shard, hop = np.divmod(np.arange(len(shards) * (num_ranks - 1)), max(num_ranks - 1, 1))
    step = hop + 1

    def after(step: np.ndarray) -> np.ndarray:
        home = shards.home[shard]
        return (home // inner + step // inner) * inner % num_ranks + (home + step) % inner

    src = after(np.where(step % inner, hop, step - inner))
    return Schedule.of(blocks, rank, stage, Transfers.of(Role.KV, shard, src, after(step), hop))
