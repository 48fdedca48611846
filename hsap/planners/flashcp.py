"""FlashCP: whole documents where balance allows, zigzag shards of documents where it doesn't, and only needed KV moves.

Paper: Wang et al., "FlashCP: Load-Balanced Communication-Efficient Context Parallelism for LLM Training" (2026, arXiv
2606.08476), of which we know the abstract: a Whole-Doc sharding strategy that saves communication at balanced load,
Per-Doc sharding beside it, a heuristic search for a good mix, and communication that knows the sharding.
Cost: a whole document moves nothing. One in zigzag shards over g ranks moves about ¾ (g - 1) of its KV rows. Queries
stay; one exchange, under the blocks that need no KV of others.
Ours, all of it beyond the abstract:
- Both areas (mean over the model's layers) and tokens are balanced. Ranks are filled one after another to the mean of
  what is left (`fill.fill`): a document that is cut goes over as many neighbouring ranks as it takes and no more, with
  the lightest whole documents beside it until both areas and tokens come out; then whole documents, densest first; a
  rank that is still short cuts one more.
- The search is over how the slack is used and how the whole documents beside a cut one are chosen: the filling of the
  fewest KV rows among those within the slack, or else the one nearest to it.
- A rank's share of a cut document is equally many of the first and of the last rows that ranks before it have left.
Options: slack, the excess of area and tokens over their means that is good enough.
"""

from __future__ import annotations

import itertools

import numpy as np

from hsap.ir.block import Blocks, Shards
from hsap.ir.check import excess
from hsap.ir.problem import Problem
from hsap.ir.schedule import Schedule, Strategy
from hsap.planners.fill import RINGS, fill
from hsap.planners.parts import mean_areas, query_home, same_both_ways, split_by_need

USED_SLACK = (1.0, 0.8, 0.6, 0.4, 0.2)
"""Whole documents may fill a rank beyond the mean by this part of the slack …"""
GAPS = (0.9, 0.6, 0.3, 0.1)
"""… and a rank that lacks less than this part of the slack is left as it is."""


def flashcp(problem: Problem, slack: float = 0.05) -> Strategy:
    """Plan whole documents and zigzag shards, even in area and tokens, with little KV to move."""
    slack = excess("planner flashcp: slack", slack)
    num_ranks = problem.topology.inter_sp
    documents = problem.layout.document_spans
    shards = Shards.of([])
    if len(documents):
        rings = ring_areas(problem, documents)
        shards = zigzag_pieces(documents, *best_filling(documents[:, 1] - documents[:, 0], rings, num_ranks, slack))
        shards = split_by_need(problem, shards, query_home)
    return same_both_ways(problem, shards, lambda blocks: _one_exchange(blocks, shards))


def best_filling(lengths: np.ndarray, rings: np.ndarray, num_ranks: int, slack: float) -> tuple[np.ndarray, ...]:
    """Search the settings of `fill`: (document, rank, first, stop) of each share, as `fill` gives them."""
    area = rings.sum(axis=1)
    order = np.argsort(-(area / lengths), kind="stable")
    best: np.ndarray | None = None
    best_key = (np.inf, np.inf)
    for used, gap, fit in itertools.product(USED_SLACK, GAPS, (True, False)):
        shares, cost, excess = fill(lengths, rings, order, num_ranks, used * slack, gap * slack, fit)
        key = (max(excess - slack, 0.0), cost)
        if key < best_key:
            best, best_key = shares, key
    assert best is not None, "some setting has a cost"
    return tuple(best.T)


def ring_areas(problem: Problem, documents: np.ndarray) -> np.ndarray:
    """Count the visible pairs of each document's rows, ring by ring: float64 [num_documents, RINGS].

    Ring k is the k-th pair of equal parts from the document's two ends inwards.
    """
    starts, lengths = documents[:, :1], np.diff(documents, axis=1)
    half = lengths * np.arange(RINGS + 1) // (2 * RINGS)
    half[:, -1] = lengths[:, 0] // 2
    borders = np.concatenate([starts + half, (starts + lengths - half)[:, ::-1]], axis=1)
    spans = np.stack([borders[:, :-1], borders[:, 1:]], axis=2).reshape(-1, 2)
    filled = np.flatnonzero(spans[:, 0] < spans[:, 1])
    areas = np.zeros(len(spans))
    areas[filled] = mean_areas(problem, spans[filled])
    areas = areas.reshape(len(documents), 2 * RINGS + 1)
    rings = areas[:, :RINGS] + areas[:, :RINGS:-1]
    rings[:, -1] += areas[:, RINGS]  # the middle token of an odd document
    return rings


def zigzag_pieces(
    documents: np.ndarray, document: np.ndarray, rank: np.ndarray, first: np.ndarray, stop: np.ndarray
) -> Shards:
    """Turn shares of documents into spans: tokens [first, stop) in the order first row, last row, second row, …"""
    start, end = documents[document].T
    early = np.stack([start + first // 2, start + stop // 2], axis=1)
    late = np.stack([end - (stop - stop // 2), end - (first - first // 2)], axis=1)
    spans, home = np.concatenate([early, late]), np.concatenate([rank, rank])
    order = np.lexsort([spans[:, 0], home])
    order = order[spans[order, 0] < spans[order, 1]]
    spans, home = spans[order], home[order]
    ranks, offsets = np.unique(home, return_index=True)
    return Shards(spans, np.append(offsets, len(spans)), ranks)


def _one_exchange(blocks: Blocks, shards: Shards) -> Schedule:
    q_home = shards.home[blocks.q]
    return Schedule.of(blocks, q_home, (q_home != shards.home[blocks.kv]).astype(np.int64))
