"""Mesh-Attention: every rank computes a 2-D tile of the attention matrix instead of a row of it.

Paper: Chen et al., "Mesh-Attention: A New Communication-Efficient Distributed Attention with Improved Data Locality"
(2025, arXiv 2512.20968). P = a · b ranks, row by row, are a mesh of b rows with a ranks each. A rank's tile is the a
query chunks of its mesh row against the b KV chunks of its mesh column, its own among both: q comes along the row, KV
along the column, partial outputs go back along the row. b = P, a = 1 is ring attention's share of the work.
Cost: a rank receives (a - 1) chunks of q and of partial o, and (b - 1) chunks of KV, of L / P rows each: about
2 L / √P rows at the best shape, where a ring needs L. What has arrived is kept: memory of a + b chunks.
Ours, as its code isn't public and packs aren't its subject:
- Each direction has the shape that moves the fewest bytes (forward q, o against k, v; backward q, do, dq against k,
  v, dk, dv), so that grouped KV heads give flat tiles. Mesh rows are neighbours: the dear side stays in a node.
- A chunk is a rank's zigzag pair of every document: any two ranks share equally much of a causal document, so all
  tiles are even. Short documents stay whole and are dealt to the ranks, as many as leave areas and tokens even.
- Order of arrivals: one chunk a stage, greedily the one that makes the most new cells of the tile computable per
  byte moved, KV on ties; chunks come from home directly. Cells without a visible pair don't exist, and rows that
  no cell of a tile uses don't travel to it.
Options: a, the query chunks of a tile in both directions (a divisor of the ranks); slack, the excess of area and tokens
over their means that whole documents may cause.
"""

from __future__ import annotations

import functools

import numpy as np

from hsap.ir.block import Blocks, Shards, cut_blocks
from hsap.ir.check import Refused, excess, whole
from hsap.ir.problem import Problem
from hsap.ir.schedule import AHEAD, DIRECTIONS, Schedule, Strategy
from hsap.loops import loop
from hsap.planners.parts import mean_areas, split_by_need
from hsap.planners.prices import away_bytes
from hsap.planners.zigzag import zigzag_shards


def mesh(problem: Problem, a: int | None = None, slack: float = 0.05) -> Strategy:
    """Plan zigzag shards and tiles of `a` query chunks by ranks / a KV chunks."""
    slack = excess("planner mesh: slack", slack)
    num_ranks = problem.topology.inter_sp
    if a is not None and num_ranks % whole("planner mesh: a, the query chunks of a tile", a):
        legal = ", ".join(map(str, _divisors(num_ranks)))
        raise Refused(f"planner mesh: a={a} doesn't divide the {num_ranks} ranks of a column; give one of {legal}")
    costs = {direction: away_bytes(problem, direction) for direction in DIRECTIONS}
    widths = {direction: a or tile_width(num_ranks, *costs[direction]) for direction in DIRECTIONS}
    places = {width: functools.partial(_tile_of, width) for width in widths.values()}
    shards = split_by_need(problem, chunks(problem, num_ranks, slack), *places.values())
    blocks = [cut_blocks(shards, problem.slices(mask)) for mask in range(len(problem.masks))]
    arrivals = {d: arrival_stages(widths[d], num_ranks // widths[d], *costs[d]) for d in DIRECTIONS}
    forward, backward = (tuple(_schedule(part, shards, widths[d], *arrivals[d]) for part in blocks) for d in DIRECTIONS)
    return Strategy(shards, forward, backward, ahead=AHEAD)


def chunks(problem: Problem, num_ranks: int, slack: float) -> Shards:
    """Cut long documents in zigzag over all ranks; the most of the shortest that can be even stay whole."""
    documents = problem.layout.document_spans
    lengths, areas = documents[:, 1] - documents[:, 0], mean_areas(problem, documents)
    mean = np.maximum([lengths.sum() / num_ranks, areas.sum() / num_ranks], 1e-9)
    weight = np.maximum(lengths / mean[0], areas / mean[1])
    by_weight = np.argsort(weight, kind="stable")
    most, few = int((weight <= 1 + slack).sum()), 0
    while few < most:  # Bisection: more whole documents are less even, nearly always.
        middle = (few + most + 1) // 2
        even = deal_whole(lengths, areas, by_weight[:middle][::-1], num_ranks, mean)[1] <= slack
        few, most = (middle, most) if even else (few, middle - 1)
    kept = by_weight[:few][::-1]
    rank, _ = deal_whole(lengths, areas, kept, num_ranks, mean)
    cut = zigzag_shards(documents[np.sort(by_weight[few:])], num_ranks)
    spans = np.concatenate([cut.spans, documents[kept]])
    home = np.concatenate([np.repeat(cut.home, np.diff(cut.offsets)), rank])
    return Shards.of([(r, spans[home == r]) for r in range(num_ranks)])


@loop
def deal_whole(
    lengths: np.ndarray, areas: np.ndarray, documents: np.ndarray, num_ranks: int, mean: np.ndarray
) -> tuple[np.ndarray, float]:
    """Give whole documents to ranks in turn, each to the one that it leaves least busy: (rank of each, excess).

    documents: those to give, in order. mean: tokens and area that count as one. Busy is the larger of both. The
    excess is that of the busiest rank's tokens or area over the ranks' average, in means.
    """
    load = np.zeros((num_ranks, 2))
    ranks = np.empty(len(documents), np.int64)
    for i, d in enumerate(documents):
        best, best_load = -1, np.inf
        for rank in range(num_ranks):
            after = max((load[rank, 0] + lengths[d]) / mean[0], (load[rank, 1] + areas[d]) / mean[1])
            if after < best_load:
                best, best_load = rank, after
        ranks[i] = best
        load[best, 0] += lengths[d]
        load[best, 1] += areas[d]
    excess = 0.0
    for side in range(2):
        excess = max(excess, (load[:, side].max() - load[:, side].mean()) / mean[side])
    return ranks, excess


def tile_width(num_ranks: int, q_cost: int, kv_cost: int) -> int:
    """Choose a, so that the fewest bytes travel (the narrowest tile on ties)."""
    return min(_divisors(num_ranks), key=lambda a: ((a - 1) * q_cost + (num_ranks // a - 1) * kv_cost, a))


def arrival_stages(a: int, b: int, q_cost: int, kv_cost: int) -> tuple[np.ndarray, np.ndarray]:
    """Order the chunks' arrivals greedily: first stage at which the t-th query and the s-th KV chunk are there.

    int64 [a] and [b]; the 0th of both is the rank's own, at stage 0.
    """
    queries, keys = [0], [0]
    while len(queries) < a or len(keys) < b:
        now = len(queries) + len(keys) - 1
        # A query chunk opens as many cells as there are keys, and the other way round.
        query_is_next = len(keys) * kv_cost > len(queries) * q_cost
        (queries if len(queries) < a and (query_is_next or len(keys) == b) else keys).append(now)
    return np.array(queries), np.array(keys)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _tile_of(a: int, q_home: np.ndarray, kv_home: np.ndarray) -> np.ndarray:
    """Rank in the mesh row of the queries and the mesh column of the keys."""
    return q_home // a * a + kv_home % a


def _schedule(blocks: Blocks, shards: Shards, a: int, query_stages: np.ndarray, key_stages: np.ndarray) -> Schedule:
    q_home, kv_home = shards.home[blocks.q], shards.home[blocks.kv]
    rank = _tile_of(a, q_home, kv_home)
    t, s = (q_home - rank) % a, (kv_home - rank) // a % len(key_stages)
    return Schedule.of(blocks, rank, np.maximum(query_stages[t], key_stages[s]))
