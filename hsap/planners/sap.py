"""SAP: sequence-aware parallelism, each document balanced for itself and then all of them together.

Paper: HSAP §3.2 and Figure 3. Its four steps:
1. Partition: one contiguous shard a rank, equal ± 1 token; each (q rank, KV rank) cell is nothing or one of A1 … A5
   (`hsap.ir.pattern`).
2. Regional strategy: a document over M ranks is one causal triangle, balanced as DistFlashAttn does it: a block at
   distance d is computed at the query's rank, in step d, if 2d < M, else at KV's rank, in step M - d. Cells of other
   masks are single blocks that go to the less busy of their two ranks (the query's on ties).
3. Global conflicts: a rank at a border belongs to several triangles. Blocks change between the ranks of their query
   and of their KV until counts are as even as they can be (`balance.even_counts`). Then every rank computes its own
   block in stage 0 and the others one a stage, in order of (step, document): steps that collide are shifted.
4. Code generation is the compiler's: transfers of a stage run under the blocks of the stage before their use.

`balance=blocks` is just that, and gives Figure 3 exactly. Cost: as many stages as the busiest rank has blocks; a
block moves one shard of KV, or q and o. Blocks count alike whatever they hold, and whole shards travel.

`balance=area` (default) is ours: visible pairs are balanced, not blocks. Homes stay as above, but a rank's tokens are
cut into several shards (at the borders of long documents, and into pieces small enough to balance), so that only a
document's own rows travel. A block may go to any rank: at a third one q and KV both arrive, also for a block whose q
and KV share a home. Where moving a query costs more than moving KV (grouped KV heads), the search starts from each
block at its query's rank instead of the regional strategy: less traffic. Each mask is balanced for itself, as layers
run one after another. Both directions share a placement, searched with the summed prices of forward and backward. A
rank computes all it has of one (q rank, KV rank) cell in one stage, and may wait for a stage in which its sender is
free (`spread`).
Options: balance; slack: the excess of the largest area over the mean with which the search is content.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hsap.ir.block import Blocks, Shards, cut_blocks
from hsap.ir.check import Refused, excess, shown
from hsap.ir.pattern import Pattern, patterns
from hsap.ir.problem import Problem
from hsap.ir.schedule import AHEAD, DIRECTIONS, Schedule, Strategy
from hsap.ir.slice import Q0, area
from hsap.ir.span import ranges
from hsap.planners.balance import even_areas, even_counts
from hsap.planners.distflash import help_early
from hsap.planners.parts import equal_shards, same_both_ways
from hsap.planners.prices import away_bytes
from hsap.planners.spread import spread

BLOCKS_PER_MEAN = 6
"""Shards are cut so that about this many of the largest blocks make up a rank's mean area …"""
MAX_PIECES = 8
"""… but into no more pieces of equal length than this a rank."""


def sap(problem: Problem, balance: str = "area", slack: float = 0.05) -> Strategy:
    """Plan contiguous shards with every document's blocks spread over its ranks, evenly for all."""
    if balance not in ("area", "blocks"):
        raise Refused(
            f"planner sap: unknown balance={shown(balance)}; choose area (visible pairs) or blocks (the paper)"
        )
    slack = excess("planner sap: slack", slack)
    if balance == "blocks":
        shards = equal_shards(problem.layout.num_tokens, problem.topology.inter_sp)
        return same_both_ways(problem, shards, lambda blocks: _by_count(problem, shards, blocks))
    tables = [problem.slices(mask) for mask in range(len(problem.masks))]
    # The mean over layers: a small window beside a full mask has little to balance, but cut everything to crumbs.
    layers = [count for _, count in problem.masks]
    total = sum(int(area(table).sum()) * count for table, count in zip(tables, layers, strict=True))
    shards = piece_shards(problem, total // sum(layers))
    schedules = tuple(_by_area(problem, shards, cut_blocks(shards, table), slack) for table in tables)
    return Strategy(shards, schedules, schedules, ahead=AHEAD)


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


def _by_count(problem: Problem, shards: Shards, blocks: Blocks) -> Schedule:
    cells = _Cells.of(problem, shards, blocks)
    rank, step = cells.regional()
    load = np.bincount(rank[rank >= 0], minlength=problem.topology.inter_sp)
    for block in np.flatnonzero(rank < 0):
        q, kv = cells.q_rank[block], cells.kv_rank[block]
        rank[block] = kv if load[kv] < load[q] else q
        load[rank[block]] += 1
    rank = even_counts(rank, cells.q_rank + cells.kv_rank - rank, problem.topology.inter_sp, step)
    return Schedule.of(blocks, rank, cells.stages(rank, _in_turn))


def _by_area(problem: Problem, shards: Shards, blocks: Blocks, slack: float) -> Schedule:
    cells = _Cells.of(problem, shards, blocks)
    forward, backward = (away_bytes(problem, direction) for direction in DIRECTIONS)
    costs = forward[0] + backward[0], forward[1] + backward[1]
    rank, _ = cells.regional()
    rank = np.where((rank < 0) | (costs[0] > costs[1]), cells.q_rank, rank)
    num_ranks = problem.topology.inter_sp
    rank = even_areas(shards, blocks, rank, num_ranks, costs, slack)
    return Schedule.of(blocks, rank, cells.stages(rank, lambda table: spread(table, num_ranks)))


@dataclass(frozen=True, slots=True, eq=False)
class _Cells:
    """The (q rank, KV rank) cell of each block, its document, and over how many ranks that document goes.

    regular: whether the block is one of A1 … A5. All are [num_blocks].
    """

    q_rank: np.ndarray
    kv_rank: np.ndarray
    document: np.ndarray
    num_ranks: np.ndarray
    regular: np.ndarray

    @classmethod
    def of(cls, problem: Problem, shards: Shards, blocks: Blocks) -> _Cells:
        borders = problem.layout.cu_seqlens
        document = np.searchsorted(borders, blocks.slices[blocks.offsets[:-1], Q0], side="right") - 1
        home = np.repeat(shards.home, np.diff(shards.offsets))
        first, last = (
            home[np.searchsorted(shards.spans[:, 0], at, side="right") - 1]
            for at in (borders[document], borders[document + 1] - 1)
        )
        regular = patterns(shards, blocks) != Pattern.OTHER
        return cls(shards.home[blocks.q], shards.home[blocks.kv], document, last - first + 1, regular)

    def regional(self) -> tuple[np.ndarray, np.ndarray]:
        """Balance each document's triangle: (rank, step) of each block; rank -1 where it is none of A1 … A5."""
        helps, step = help_early((self.q_rank - self.kv_rank) % self.num_ranks, self.num_ranks)
        return np.where(self.regular, np.where(helps, self.kv_rank, self.q_rank), -1), step

    def stages(self, rank: np.ndarray, place: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Lay each rank's blocks on the time axis: those that need no transfer in stage 0, then a cell a stage.

        place: gives the stages of cells, rows (rank, q rank, KV rank). They are sorted by rank, then by the step that
        the regional strategy has for a block on that rank, then by document.
        """
        distance = (self.q_rank - self.kv_rank) % self.num_ranks
        step = np.where(rank == self.q_rank, distance, self.num_ranks - distance)
        away = np.flatnonzero((self.q_rank != rank) | (self.kv_rank != rank))
        keys = (self.kv_rank, self.q_rank, self.document, step, rank)
        away = away[np.lexsort([key[away] for key in keys])]
        cells = np.stack([rank, self.q_rank, self.kv_rank], axis=1)[away]
        first = (np.diff(cells, axis=0, prepend=-1) != 0).any(axis=1)
        stage = np.zeros(len(rank), np.int64)
        stage[away] = place(cells[first])[np.cumsum(first) - 1]
        return stage


def _in_turn(cells: np.ndarray) -> np.ndarray:
    """Number each rank's cells from 1 as they come."""
    begins = np.searchsorted(cells[:, 0], cells[:, 0])
    return np.arange(len(cells)) - begins + 1
