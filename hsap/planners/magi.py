"""MagiAttention: equal chunks dealt by a min-heap, KV multicast to just the ranks that see it.

Paper: SandAI, "MagiAttention" (2025), the sections on load-balanced dispatch, on the group-cast primitive and on
multi-stage overlap. The packed sequence is cut into equal chunks, as many for each rank; from the largest area down, a
chunk goes to the least busy rank that has room left. Queries stay, and remote KV comes in stages.
Cost: areas within about a chunk's of each other and tokens equal, for any mask. Chunks of one document are strewn over
all ranks, so that a long document's KV goes nearly everywhere: up to (N - 1) · L / N rows a rank.
Ours: instead of padding to a multiple of the chunks, their lengths differ by 1. A chunk's area is the mean over the
model's layers. Which KV comes in which stage is by ring distance, in equal parts of the rows that a rank receives; the
paper searches for the stages. Its dynamic solver, which also moves queries, is not this planner.
Options: chunks, a rank's number; stages, in which remote KV comes and is used. relay=True is the paper's hierarchical
group-cast.
"""

from __future__ import annotations

import heapq

import numpy as np

from hsap.ir.block import Blocks, Shards
from hsap.ir.check import whole
from hsap.ir.problem import Problem
from hsap.ir.schedule import Schedule, Strategy
from hsap.ir.sort import distinct
from hsap.planners.parts import mean_areas, query_home, same_both_ways, split_by_need

MAX_STAGES = 1 << 16


def magi(problem: Problem, chunks: int = 8, stages: int = 1) -> Strategy:
    """Plan equal chunks with even areas, every rank fetching the KV that it sees."""
    chunks = whole("planner magi: chunks of a rank", chunks)
    stages = whole("planner magi: stages of remote KV", stages, 1, MAX_STAGES)
    num_ranks, num_tokens = problem.topology.inter_sp, problem.layout.num_tokens
    # No more chunks than tokens; but each rank must still have a place for as many.
    num_chunks = num_ranks * min(chunks, max(-(-num_tokens // num_ranks), 1))
    borders = num_tokens * np.arange(num_chunks + 1) // num_chunks
    spans = np.stack([borders[:-1], borders[1:]], axis=1)
    spans = spans[spans[:, 0] < spans[:, 1]]
    rank = np.array(deal_chunks(mean_areas(problem, spans).tolist(), num_ranks), dtype=np.int64)
    shards = Shards.of([(r, spans[rank == r]) for r in range(num_ranks)])
    shards = split_by_need(problem, shards, query_home)
    return same_both_ways(problem, shards, lambda blocks: _in_stages(blocks, shards, num_ranks, stages))


def deal_chunks(areas: list[float], num_ranks: int) -> list[int]:
    """Give chunks to ranks, the largest first to the least busy rank with room: the rank of each chunk.

    All ranks get equally many; where that doesn't divide, the first to be full get one more.
    """
    room = -(-len(areas) // num_ranks)
    heap = [(0.0, rank, room) for rank in range(num_ranks)]
    ranks = [0] * len(areas)
    for chunk in sorted(range(len(areas)), key=lambda c: (-areas[c], c)):
        load, rank, left = heapq.heappop(heap)
        ranks[chunk] = rank
        if left > 1:
            heapq.heappush(heap, (load + areas[chunk], rank, left - 1))
    return ranks


def _in_stages(blocks: Blocks, shards: Shards, num_ranks: int, stages: int) -> Schedule:
    """Compute at the queries' home: stage 0 what is there, then the remote KV in equal parts."""
    rank, kv_home = shards.home[blocks.q], shards.home[blocks.kv]
    distance = (rank - kv_home) % num_ranks
    # One entry for each shard that a rank receives, by rank and then by distance.
    key, entry = distinct((rank * num_ranks + distance) * max(len(shards), 1) + blocks.kv)
    owner, rows = key // (num_ranks * max(len(shards), 1)), shards.tokens[key % max(len(shards), 1)]
    rows[(key // max(len(shards), 1)) % num_ranks == 0] = 0
    ends = np.cumsum(rows)
    total = np.bincount(owner, weights=rows, minlength=num_ranks).astype(np.int64)
    before = ends - rows - (np.cumsum(total) - total)[owner]
    stage = 1 + before * stages // np.maximum(total[owner], 1)
    return Schedule.of(blocks, rank, np.where(distance == 0, 0, stage[entry]))
