"""Balance: move blocks between ranks until the busiest one can't be relieved. Two ways, for `sap`.

`even_counts` is an optimal semi-matching: Harvey, Ladner, Lovász, Tamir, "Semi-matchings for bipartite graphs and load
balancing" (2006): where no chain of moves takes a block from a rank to one with two fewer, the counts are as even as
they can be. `even_areas` is our local search over areas and traffic.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from hsap.ir.block import Blocks, Shards


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

    costs: elements that travel per row of a query and of a KV shard that is used away from home. The busiest rank
    gives one block at a time to any rank that stays below it, at the least extra traffic per area that it sheds; moves
    that would lift the receiver over the goal are taken only when there are no others.
    """
    search = _Search(shards, blocks, rank, num_ranks, costs)
    goal = search.load.mean() * (1 + slack)
    while search.load.max() > goal and search.relieve(int(search.load.argmax()), goal):
        pass
    return search.rank


class _Search:
    """Where the blocks are, how busy each rank is, and what each shard would cost each rank."""

    def __init__(self, shards: Shards, blocks: Blocks, rank: np.ndarray, num_ranks: int, costs) -> None:
        self.rank = rank.copy()
        self.area = blocks.area.astype(np.float64)
        self.load = np.bincount(rank, weights=self.area, minlength=num_ranks)
        self.shard = (blocks.q, blocks.kv)
        self.uses, self.price, self.missing = [], [], []
        for shard, cost in zip(self.shard, costs):
            uses = np.bincount(rank * len(shards) + shard, minlength=num_ranks * len(shards))
            uses = uses.reshape(num_ranks, len(shards))
            # Two more at home, where a shard is whether it is used or not: that use is never the first nor the last.
            uses[shards.home, np.arange(len(shards))] += 2
            self.uses.append(uses)
            self.price.append(shards.tokens * float(cost))
            self.missing.append(np.where(uses == 0, self.price[-1], 0.0))

    def relieve(self, busy: int, goal: float) -> bool:
        """Move blocks off a rank until it is at the goal or can give none; False where it gave none."""
        mine = np.flatnonzero(self.rank == busy)
        area = self.area[mine]
        q, kv = (shard[mine] for shard in self.shard)
        extra = self.missing[0][:, q] + self.missing[1][:, kv]
        gave = False
        while self.load[busy] > goal:
            after = self.load[:, None] + area
            fits = after <= goal
            if not fits.any():
                fits = after < self.load[busy]
                if not fits.any():
                    break
            saved = sum((u[busy, s] == 1) * p[s] for u, s, p in zip(self.uses, (q, kv), self.price))
            worth = np.where(fits, (extra - saved) / np.minimum(area, self.load[busy] - goal), np.inf)
            # Least traffic first; where it is equal (mostly at nothing), the receiver with the most room.
            to, at = np.nonzero(worth == worth.min())
            pick = int(self.load[to].argmin())
            to, at = int(to[pick]), int(at[pick])
            self._move(int(mine[at]), busy, to)
            extra[to] = self.missing[0][to, q] + self.missing[1][to, kv]
            area[at] = np.inf
            gave = True
        return gave

    def _move(self, block: int, old: int, new: int) -> None:
        self.rank[block] = new
        self.load[old] -= self.area[block]
        self.load[new] += self.area[block]
        for shards, uses, price, missing in zip(self.shard, self.uses, self.price, self.missing):
            shard = shards[block]
            uses[old, shard] -= 1
            uses[new, shard] += 1
            missing[new, shard] = 0.0
            missing[old, shard] = 0.0 if uses[old, shard] else price[shard]
