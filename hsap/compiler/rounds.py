"""Rounds: the transfers of a stage dealt to batched point-to-point groups.

In one round every rank sends to at most one rank and receives from at most one (HSAP §3.2: a batched call covers the
whole group without conflicts). That is an edge colouring of the bipartite graph senders × receivers; König: as many
colours as the busiest rank has partners are enough, and alternating paths find them.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from hsap.ir.sort import order_of


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
    most = 0
    for graph in range(len(num_colours)):
        most = max(most, num_colours[graph])
    edge_at = np.empty((2 * num_ranks, most), np.int64)
    for graph in range(len(num_colours)):
        if num_colours[graph] < 2:
            continue  # its only colour is 0
        for node in range(2 * num_ranks):
            for c in range(num_colours[graph]):
                edge_at[node, c] = -1
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
    by_key = order_of(key)
    return _deal(key[by_key], by_key, num_ranks, first)


@njit(cache=True)
def _deal(keys, by_key, num_ranks, first):
    """Colour the edges of each stage and number the rounds. keys: (stage, src, dst) as one number, rising."""
    num_pairs = num_ranks * num_ranks
    num_stages = keys[-1] // num_pairs + 1
    src, dst, edge_of = np.empty_like(keys), np.empty_like(keys), np.empty_like(keys)
    borders, degree = np.zeros(num_stages + 1, np.int64), np.zeros((num_stages, 2, num_ranks), np.int64)
    edges = 0
    for i in range(len(keys)):
        if i == 0 or keys[i] != keys[i - 1]:
            stage, pair = keys[i] // num_pairs, keys[i] % num_pairs
            src[edges], dst[edges] = pair // num_ranks, pair % num_ranks
            degree[stage, 0, src[edges]] += 1
            degree[stage, 1, dst[edges]] += 1
            edges += 1
            borders[stage + 1] = edges
        edge_of[by_key[i]] = edges - 1
    num_rounds, colours = np.zeros(num_stages, np.int64), np.empty_like(keys)
    for stage in range(num_stages):
        borders[stage + 1] = max(borders[stage], borders[stage + 1])
        for edge in range(borders[stage], borders[stage + 1]):
            colours[edge] = first
            busiest = max(degree[stage, 0, src[edge]], degree[stage, 1, dst[edge]])
            num_rounds[stage] = max(num_rounds[stage], busiest)
        first += num_rounds[stage]
    _colour(src, dst, num_ranks, borders, num_rounds, colours)
    for i in range(len(keys)):
        edge_of[i] = colours[edge_of[i]]
    return edge_of
