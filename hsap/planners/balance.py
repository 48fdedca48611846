"""Balance: move blocks between ranks until the busiest one can't be relieved. Two ways, for `sap`.

`even_counts` is an optimal semi-matching: Harvey, Ladner, Lovász, Tamir, "Semi-matchings for bipartite graphs and load
balancing" (2006): where no chain of moves takes a block from a rank to one with two fewer, the counts are as even as
they can be. `even_areas` is our local search over areas and traffic.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from hsap.ir.block import Blocks, Shards
from hsap.loops import loop


def even_counts(rank: np.ndarray, other: np.ndarray, num_ranks: int, step: np.ndarray) -> np.ndarray:
    """Even out the number of blocks of each rank: int64 [num_blocks], the new ranks.

    rank: where a block is; other: the one other rank that may compute it (equal: it stays). Deterministic: of the
    busiest ranks that can be relieved, the one goes first whose chain of moves to a rank with at least two blocks fewer
    is shortest (so that few blocks leave their place; lowest index on ties); a rank gives the block of the latest
    `step` first.
    """
    rank, other = rank.tolist(), other.tolist()
    load = [0] * num_ranks
    held: list[dict[int, list[int]]] = [{} for _ in range(num_ranks)]
    for block in sorted(range(len(rank)), key=lambda b: (step[b], b)):
        load[rank[block]] += 1
        if other[block] != rank[block]:
            held[rank[block]].setdefault(other[block], []).append(block)
    while chain := _next_chain(load, held):
        for a, b in chain:
            block = held[a][b].pop()
            if not held[a][b]:
                del held[a][b]
            held[b].setdefault(a, []).append(block)
            rank[block], other[block] = b, a
        load[chain[0][0]] -= 1
        load[chain[-1][1]] += 1
    return np.array(rank, dtype=np.int64)


def _next_chain(load: list[int], held: list[dict[int, list[int]]]) -> list[tuple[int, int]] | None:
    """Chain of (from, to) moves that takes a block off the busiest rank that can be relieved; None where none can."""
    best, best_load = None, -1
    for start in sorted(range(len(load)), key=lambda r: (-load[r], r)):
        if load[start] < best_load:
            break
        chain = _chain_from(start, load, held)
        if chain and (best is None or len(chain) < len(best)):
            best, best_load = chain, load[start]
    return best


def _chain_from(start: int, load: list[int], held: list[dict[int, list[int]]]) -> list[tuple[int, int]]:
    """Shortest chain from a rank to one with at least two blocks fewer (breadth first); empty where there is none."""
    came_from = {start: start}
    queue = deque([start])
    while queue:
        at = queue.popleft()
        if load[at] <= load[start] - 2:
            chain = []
            while at != start:
                chain.append((came_from[at], at))
                at = came_from[at]
            return chain[::-1]
        for nearby in sorted(held[at]):
            if nearby not in came_from:
                came_from[nearby] = at
                queue.append(nearby)
    return []


def even_areas(
    shards: Shards, blocks: Blocks, rank: np.ndarray, num_ranks: int, costs: tuple[float, float], slack: float
) -> np.ndarray:
    """Lower the largest area of a rank to (1 + slack) × mean where blocks allow it: int64 [num_blocks], the new ranks.

    costs: bytes that travel per row of a query and of a KV shard that is used away from home. The busiest rank
    gives one block at a time to any rank that stays below it, at the least extra traffic per area that it sheds; moves
    that would lift the receiver over the goal are taken only when there are no others.
    """
    sides, area = np.stack([blocks.q, blocks.kv]), blocks.area.astype(np.float64)
    uses = np.zeros((2, num_ranks, len(shards)), np.int32)
    for used, shard in zip(uses, sides):
        used[:] = np.bincount(rank * len(shards) + shard, minlength=used.size).reshape(used.shape)
        # Two more at home, where a shard is whether it is used or not: that use is never the first nor the last.
        used[shards.home, np.arange(len(shards))] += 2
    price = shards.tokens * np.array(costs, np.float64)[:, None]
    load = np.bincount(rank, weights=area, minlength=num_ranks)
    goal = load.mean() * (1 + slack)
    rank = rank.astype(np.int64)
    gave = True
    while gave and load.max() > goal:
        busy = int(load.argmax())
        gave = _relieve(busy, goal, np.flatnonzero(rank == busy), rank, load, area, sides, uses, price)
    return rank


@loop
def _relieve(
    busy: int,
    goal: float,
    mine: np.ndarray,
    rank: np.ndarray,
    load: np.ndarray,
    area: np.ndarray,
    sides: np.ndarray,
    uses: np.ndarray,
    price: np.ndarray,
) -> bool:
    """Move blocks off a rank until it is at the goal or can give none; False where it gave none.

    mine: its blocks. rank, load: of all blocks and ranks so far, updated. sides: query and KV shard of each block.
    uses: how often each side's shards are used on each rank, int32 [2, num_ranks, num_shards], updated. price: what a
    shard's way costs.
    """
    gave = False
    while load[busy] > goal:
        to, at = _cheapest(busy, goal, goal, mine, load, area, sides, uses, price)
        if at < 0:
            # Below the busy one, if that is all there is.
            to, at = _cheapest(busy, goal, np.nextafter(load[busy], 0.0), mine, load, area, sides, uses, price)
        if at < 0:
            break
        block = mine[at]
        rank[block] = to
        load[busy] -= area[block]
        load[to] += area[block]
        for side in range(2):
            uses[side, busy, sides[side, block]] -= 1
            uses[side, to, sides[side, block]] += 1
        for later in range(at + 1, len(mine)):
            mine[later - 1] = mine[later]
        mine = mine[:-1]
        gave = True
    return gave


@loop
def _cheapest(
    busy: int,
    goal: float,
    limit: float,
    mine: np.ndarray,
    load: np.ndarray,
    area: np.ndarray,
    sides: np.ndarray,
    uses: np.ndarray,
    price: np.ndarray,
) -> tuple[int, int]:
    """Move with the least extra traffic per area shed that lifts no rank over a limit: (to, place in `mine`) or -1s.

    Where it is equal (mostly at nothing), the receiver with the most room, then the first.
    """
    saved = np.zeros(len(mine))
    for at in range(len(mine)):
        for side in range(2):
            shard = sides[side, mine[at]]
            saved[at] += price[side, shard] if uses[side, busy, shard] == 1 else 0.0
    least, best_to, best_at = np.inf, -1, -1
    for to in range(len(load)):
        for at in range(len(mine)):
            block = mine[at]
            if load[to] + area[block] <= limit:
                q, kv = sides[0, block], sides[1, block]
                extra = (0.0 if uses[0, to, q] else price[0, q]) + (0.0 if uses[1, to, kv] else price[1, kv])
                worth = (extra - saved[at]) / min(area[block], load[busy] - goal)
                if worth < least or (worth == least and load[to] < load[best_to]):
                    least, best_to, best_at = worth, to, at
    return best_to, best_at
