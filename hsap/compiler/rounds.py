"""Rounds: the transfers of a stage dealt to batched point-to-point groups.

In one round every rank sends to at most one rank and receives from at most one (HSAP §3.2: a batched call covers the
whole group without conflicts). That is an edge colouring of the bipartite graph senders × receivers; König: as many
colours as the busiest rank has partners are enough, and alternating paths find them.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from hsap.ir.sort import distinct


def colour(src: np.ndarray, dst: np.ndarray, num_ranks: int) -> np.ndarray:
    """Colour the edges src -> dst so that equal colours share no sender and no receiver: int64 [num_edges].

    Edges are distinct. Uses exactly the largest degree's number of colours, and is deterministic.
    """
    num_colours = int(np.bincount(np.concatenate([src, dst + num_ranks])).max()) if len(src) else 0
    colours = np.zeros(len(src), np.int64)
    _colour(src, dst, num_ranks, np.array([0, len(src)]), np.array([num_colours]), colours)
    return colours


@njit(cache=True)
def _colour(src, dst, num_ranks, borders, num_colours, colours):
    """Add its colour to each edge's entry of `colours`; edges [borders[g], borders[g + 1]) are a graph of their own.

    num_colours: largest degree of each graph. The lowest colour that both ends have free is taken; where there is
    none, one that is free at the sender is freed at the receiver.
    """
    # Nodes are senders, then receivers; edge_at[node, colour] is the edge there or -1.
    edge_at = np.empty((2 * num_ranks, num_colours.max()), np.int64)
    for graph in range(len(num_colours)):
        if num_colours[graph] < 2:
            continue  # its only colour is 0
        edge_at[:, : num_colours[graph]] = -1
        for edge in range(borders[graph], borders[graph + 1]):
            u, v = edge_at[src[edge]], edge_at[num_ranks + dst[edge]]
            chosen = 0
            while chosen < num_colours[graph] and (u[chosen] >= 0 or v[chosen] >= 0):
                chosen += 1
            if chosen == num_colours[graph]:
                chosen, other = 0, 0
                while u[chosen] >= 0:
                    chosen += 1
                while v[other] >= 0:
                    other += 1
                _flip(edge_at, src, dst, num_ranks, num_ranks + dst[edge], chosen, other)
            u[chosen] = v[chosen] = edge
        for node in range(num_ranks):
            for c in range(num_colours[graph]):
                if edge_at[node, c] >= 0:
                    colours[edge_at[node, c]] += c


@njit(cache=True)
def _flip(edge_at, src, dst, num_ranks, receiver, a, b):
    """Swap colours a and b on the alternating path that leaves `receiver` by a, so that a becomes free there."""
    node, wanted, last = receiver, a, -1
    while True:
        # At each node of the path the edge that came gets the colour of the one that goes.
        edge = edge_at[node, wanted]
        edge_at[node, wanted], edge_at[node, a + b - wanted] = last, edge
        if edge < 0:
            return
        node = src[edge] if node >= num_ranks else num_ranks + dst[edge]
        wanted, last = a + b - wanted, edge


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
    _colour(src, dst, num_ranks, borders, num_rounds, rounds)
    return rounds[index]
