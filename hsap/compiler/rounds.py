"""Rounds: the transfers of a stage dealt to batched point-to-point groups.

In one round every rank sends to at most one rank and receives from at most one (HSAP §3.2: a batched call covers the
whole group without conflicts). That is an edge colouring of the bipartite graph senders × receivers; König: as many
colours as the busiest rank has partners are enough, and alternating paths find them.
"""

from __future__ import annotations

import numpy as np

from hsap.ir.sort import distinct


def colour(src: np.ndarray, dst: np.ndarray, num_ranks: int) -> np.ndarray:
    """Colour the edges src -> dst so that equal colours share no sender and no receiver: int64 [num_edges].

    Edges are distinct. Uses exactly the largest degree's number of colours, and is deterministic.
    """
    num_colours = int(np.bincount(np.concatenate([src, dst + num_ranks])).max()) if len(src) else 0
    # Nodes are senders, then receivers; a colour is a bit, so that the lowest free one is one operation.
    free = [(1 << num_colours) - 1] * (2 * num_ranks)
    edge_at: list[dict[int, int]] = [{} for _ in free]
    ends = list(zip(src.tolist(), (dst + num_ranks).tolist()))
    for edge, (u, v) in enumerate(ends):
        both = free[u] & free[v]
        if both:
            bit = both & -both
        else:
            bit = free[u] & -free[u]
            _flip(free, edge_at, ends, v, bit, free[v] & -free[v])
        edge_at[u][bit] = edge_at[v][bit] = edge
        free[u] ^= bit
        free[v] ^= bit
    colours = np.empty(len(ends), np.int64)
    for edges in edge_at[:num_ranks]:
        for bit, edge in edges.items():
            colours[edge] = bit.bit_length() - 1
    return colours


def _flip(free, edge_at, ends, receiver: int, a: int, b: int) -> None:
    """Swap colours a and b on the alternating path that leaves `receiver` by a, so that a becomes free there."""
    node, wanted, path = receiver, a, []
    while wanted in edge_at[node]:
        edge = edge_at[node][wanted]
        path.append((edge, wanted))
        u, v = ends[edge]
        node, wanted = u if node == v else v, a ^ b ^ wanted
    for edge, bit in path:
        for node in ends[edge]:
            del edge_at[node][bit]
            free[node] |= bit
    for edge, bit in path:
        for node in ends[edge]:
            edge_at[node][a ^ b ^ bit] = edge
            free[node] &= ~(a ^ b ^ bit)


def assign_rounds(stage: np.ndarray, src: np.ndarray, dst: np.ndarray, num_ranks: int, first: int) -> np.ndarray:
    """Number the rounds of all transfers, rising with the stage from `first`: int64 [num_transfers].

    All that goes from one rank to another in one stage travels in one round.
    """
    if not len(stage):
        return np.zeros(0, np.int64)
    key = ((stage - stage.min()) * num_ranks + src) * num_ranks + dst
    key, index = distinct(key)
    sender, dst = np.divmod(key, num_ranks)
    stage, src = np.divmod(sender, num_ranks)
    num_stages = int(stage[-1]) + 1
    degree = [np.bincount(stage * num_ranks + end, minlength=num_stages * num_ranks) for end in (src, dst)]
    num_rounds = np.max(degree, axis=0).reshape(num_stages, num_ranks).max(axis=1)
    rounds = (first + np.cumsum(num_rounds) - num_rounds)[stage]
    borders = np.searchsorted(stage, np.arange(num_stages + 1))
    for s in np.flatnonzero(num_rounds > 1).tolist():
        here = slice(borders[s], borders[s + 1])
        rounds[here] += colour(src[here], dst[here], num_ranks)
    return rounds[index]
