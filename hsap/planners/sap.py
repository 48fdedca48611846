"""SAP: sequence-aware parallelism, each document balanced for itself and then all of them together.

Paper: HSAP §3.2 and Figure 3. Its four steps:
1. Partition: one contiguous shard a rank, equal ± 1 token; each (q rank, KV rank) cell is nothing or one of A1 … A5
   (`hsap.ir.pattern`).
2. Regional strategy: a document over ranks a … b is one causal triangle, balanced as DistFlashAttn does it: a block at
   distance d of b - a + 1 = M ranks is computed at the query's rank in step d if 2d < M, else at KV's in step M - d.
   Cells of other masks are single blocks that go to the less busy of their two ranks (the query's on ties).
3. Global conflicts: a rank at a border belongs to several triangles. Blocks change between the ranks of their query and
   of their KV until counts are as even as they can be (`balance.even_counts`). Then every rank computes its own block in
   stage 0 and the others one a stage, in order of (regional step, document), so steps that collide are shifted.
4. Code generation is the compiler's: transfers of a stage run under the blocks of the stage before their use.

`balance=blocks` is just that, and gives Figure 3 exactly. Cost: as many stages as the busiest rank has blocks; a
block moves one shard of KV, or q and o. Blocks count alike whatever they hold, and whole shards travel.

`balance=area` (default) is ours: visible pairs are balanced, not blocks. Homes stay as above, but a rank's tokens are
cut into several shards (borders of long documents, and pieces small enough to balance), so that only the document's
rows travel; a block may go to a third rank (then q and KV both travel, also for a block whose q and KV share a home);
each mask and direction is placed for itself, because layers run one after another and moving q costs more in backward
(q, do, dq against KV, dKV). A rank computes all it has of one (q rank, KV rank) cell in one stage.
Options: balance; slack: the area over the mean, as a share of it, at which the search is content.
"""

from __future__ import annotations

import math

import numpy as np

from hsap.ir.block import Blocks, Shards, cut_blocks
from hsap.ir.heads import HeadShape
from hsap.ir.pattern import Pattern, patterns
from hsap.ir.problem import Problem
from hsap.ir.schedule import DIRECTIONS, Schedule, Strategy
from hsap.ir.slice import area
from hsap.ir.span import ranges
from hsap.planners.balance import even_areas, even_counts
from hsap.planners.distflash import help_early
from hsap.planners.parts import equal_shards, same_both_ways

BLOCKS_PER_MEAN = 4
"""Shards are cut so that no block's area is more than this part of a rank's mean."""
MAX_PIECES = 8
"""… but no shorter than this part of a rank's tokens."""


def sap(problem: Problem, balance: str = "area", slack: float = 0.02) -> Strategy:
    """Plan contiguous shards with every document's blocks spread over its ranks, evenly for all."""
    if balance not in ("area", "blocks"):
        raise ValueError(
            f"planner sap: unknown balance {balance!r}; choose area (visible pairs) or blocks (the paper's)"
        )
    slack = float(slack)
    if not 0 <= slack < math.inf:
        raise ValueError(f"planner sap: slack={slack} must be a number of at least 0, as 0.02 for 2 % over the mean")
    if balance == "blocks":
        shards = equal_shards(problem.layout.num_tokens, problem.topology.inter_sp)
        return same_both_ways(problem, shards, lambda blocks: _by_count(problem, shards, blocks))
    tables = [problem.slices(mask) for mask in range(len(problem.masks))]
    shards = piece_shards(problem, min(int(area(table).sum()) for table in tables))
    blocks = [cut_blocks(shards, table) for table in tables]
    return Strategy(shards, *(tuple(_by_area(problem, shards, b, d, slack) for b in blocks) for d in DIRECTIONS))


def piece_shards(problem: Problem, total_area: int) -> Shards:
    """Cut each rank's tokens at the borders of long documents, and these into pieces of a grain or less.

    Long documents are those that cross to another rank or exceed the grain; short ones are kept together up to it.
    """
    num_ranks, num_tokens = problem.topology.inter_sp, problem.layout.num_tokens
    rank_borders = num_tokens * np.arange(num_ranks + 1) // num_ranks
    share = max(-(-num_tokens // num_ranks), 1)
    wanted = math.isqrt(total_area // (num_ranks * BLOCKS_PER_MEAN))
    grain = min(max(wanted, -(-share // MAX_PIECES), 1), share)
    starts, stops = problem.layout.document_spans.T
    first, last = (np.searchsorted(rank_borders, at, side="right") for at in (starts, stops - 1))
    long = (first != last) | (stops - starts > grain)
    turns = np.flatnonzero(np.diff(starts // grain, prepend=0)) if len(starts) else starts
    borders = np.unique(np.concatenate([rank_borders, starts[long], stops[long], starts[turns]]))
    lengths = np.diff(borders)
    counts = -(-lengths // grain)
    whole = ~long[np.searchsorted(starts, borders[:-1], side="right") - 1] if len(starts) else counts > 0
    counts = np.where(whole, 1, counts)
    owner, part = ranges(np.zeros_like(counts), counts)
    begin = borders[owner] + lengths[owner] * part // counts[owner]
    end = borders[owner] + lengths[owner] * (part + 1) // counts[owner]
    home = np.searchsorted(rank_borders, begin, side="right") - 1
    return Shards(np.stack([begin, end], axis=1), np.arange(len(begin) + 1), home)


def _regional(problem: Problem, shards: Shards, blocks: Blocks) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Give each block's (rank, step, document) of the regional strategy; rank -1 where a cell is none of A1 … A5."""
    q_rank, kv_rank = shards.home[blocks.q], shards.home[blocks.kv]
    borders = problem.layout.cu_seqlens
    document = np.searchsorted(borders, blocks.slices[blocks.offsets[:-1], 0], side="right") - 1
    rank_of = np.repeat(shards.home, np.diff(shards.offsets))
    first, last = (
        rank_of[np.searchsorted(shards.spans[:, 0], at, side="right") - 1]
        for at in (borders[document], borders[document + 1] - 1)
    )
    size = last - first + 1
    helps, step = help_early((q_rank - kv_rank) % size, size)
    rank = np.where(helps, kv_rank, q_rank)
    regular = (patterns(shards, blocks) != Pattern.OTHER) | (q_rank == kv_rank)
    return np.where(regular, rank, -1), step, document


def _by_count(problem: Problem, shards: Shards, blocks: Blocks) -> Schedule:
    num_ranks = problem.topology.inter_sp
    q_rank, kv_rank = shards.home[blocks.q], shards.home[blocks.kv]
    rank, step, document = _regional(problem, shards, blocks)
    load = np.bincount(rank[rank >= 0], minlength=num_ranks)
    for block in np.flatnonzero(rank < 0):
        q, kv = q_rank[block], kv_rank[block]
        rank[block] = kv if load[kv] < load[q] else q
        load[rank[block]] += 1
    rank = even_counts(rank, q_rank + kv_rank - rank, num_ranks, step)
    return _in_stages(shards, blocks, rank, step, document)


def _by_area(problem: Problem, shards: Shards, blocks: Blocks, direction: str, slack: float) -> Schedule:
    rank, step, document = _regional(problem, shards, blocks)
    rank = np.where(rank < 0, shards.home[blocks.q], rank)
    costs = row_costs(problem.heads, direction)
    rank = even_areas(shards, blocks, rank, problem.topology.inter_sp, costs, slack)
    return _in_stages(shards, blocks, rank, step, document)


def row_costs(heads: HeadShape, direction: str) -> tuple[int, int]:
    """Elements that travel per (query row, KV row) of a block computed away from home: q, o | kv; q, do, dq | kv, dkv."""
    q, kv = heads.num_q_heads * heads.head_dim, 2 * heads.num_kv_heads * heads.head_dim
    return (2 * q, kv) if direction == "forward" else (3 * q, 2 * kv)


def _in_stages(shards: Shards, blocks: Blocks, rank: np.ndarray, step: np.ndarray, document: np.ndarray) -> Schedule:
    """Lay each rank's blocks on the time axis: what needs no transfer in stage 0, then one cell a stage by step."""
    if not len(blocks):
        return Schedule.of(blocks, rank, rank)
    q_rank, kv_rank = shards.home[blocks.q], shards.home[blocks.kv]
    away = (q_rank != rank) | (kv_rank != rank)
    order = np.lexsort([kv_rank, q_rank, document, step, away, rank])
    key = np.stack([rank, q_rank, kv_rank])[:, order]
    new = np.r_[True, (key[:, 1:] != key[:, :-1]).any(axis=0)] & away[order]
    count = np.cumsum(new)
    begins = np.flatnonzero(np.r_[True, key[0, 1:] != key[0, :-1]])
    before = (count - new)[begins]
    stage = np.empty_like(rank)
    stage[order] = count - np.repeat(before, np.diff(np.append(begins, len(order))))
    return Schedule.of(blocks, rank, stage)
