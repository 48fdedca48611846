"""Rounds: the transfers of a stage dealt to batched point-to-point groups.

In one round every rank sends to at most one rank and receives from at most one (HSAP §3.2: a batched call covers the
whole group without conflicts). That is an edge colouring of the bipartite graph senders × receivers; König: as many
colours as the busiest rank has partners are enough, and alternating paths find them.
"""

from __future__ import annotations

import numpy as np

from hsap.compiler.widen import Moves
from hsap.ir.sort import distinct, order_of
from hsap.loops import inner, loop


def _nodes(num_ranks: int, num_colours: int) -> np.ndarray:
    """Room for the edge of each colour at each node, senders before receivers: int64 [2 * num_ranks, num_colours]."""
    return np.empty((2 * num_ranks, num_colours), np.int64)


@loop
def _colour(
    src: np.ndarray,
    dst: np.ndarray,
    borders: np.ndarray,
    num_colours: np.ndarray,
    colours: np.ndarray,
    edge_at: np.ndarray,
) -> None:
    """Add its colour to each edge's entry of `colours`; edges [borders[g], borders[g + 1]) are a graph of their own.

    num_colours: largest degree of each graph. edge_at: room, of `_nodes`. The lowest colour that both ends have free is
    taken; where there is none, one that is free at the sender is freed at the receiver.
    """
    # Nodes are senders, then receivers; edge_at[node, colour] is the edge there or -1.
    num_ranks = len(edge_at) // 2
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


@inner
def _flip(edge_at: np.ndarray, src: np.ndarray, dst: np.ndarray, num_ranks: int, receiver: int, a: int, b: int) -> None:
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


def rounds_of(moves: Moves, num_ranks: int) -> np.ndarray:
    """Number the rounds from 0 on, of moves that begin and end in the same stages together; see `assign_rounds`."""
    begin = int(moves.stage.min(initial=0))
    num_stages = int(moves.until.max(initial=0)) - begin + 1
    _, when = distinct((moves.stage - begin) * num_stages + moves.until - begin)
    return assign_rounds(when, moves.src, moves.dst, num_ranks, 0)


def assign_rounds(stage: np.ndarray, src: np.ndarray, dst: np.ndarray, num_ranks: int, first: int) -> np.ndarray:
    """Number the rounds of all transfers, rising with the stage from `first`: int64 [num_transfers].

    All that goes from one rank to another in one stage travels in one round.
    """
    if not len(stage):
        return np.zeros(0, np.int64)
    key = ((stage - stage.min()) * num_ranks + src) * num_ranks + dst
    by_key = order_of(key)
    keys = key[by_key]
    num_stages = int(stage.max() - stage.min()) + 1
    (src, dst, colours, edge_of), borders = np.empty((4, len(keys)), np.int64), np.zeros(num_stages + 1, np.int64)
    degree, num_rounds = np.zeros((num_stages, 2, num_ranks), np.int64), np.zeros(num_stages, np.int64)
    _deal(keys, by_key, first, src, dst, edge_of, borders, degree, num_rounds, colours)
    _colour(src, dst, borders, num_rounds, colours, _nodes(num_ranks, int(num_rounds.max())))
    return colours[edge_of]


@loop
def _deal(
    keys: np.ndarray,
    by_key: np.ndarray,
    first: int,
    src: np.ndarray,
    dst: np.ndarray,
    edge_of: np.ndarray,
    borders: np.ndarray,
    degree: np.ndarray,
    num_rounds: np.ndarray,
    colours: np.ndarray,
) -> None:
    """Fill the edges of each stage, their first round as `colours`, and the edge of each transfer.

    keys: (stage, src, dst) as one number, rising. borders, degree, num_rounds: zeros.
    """
    num_ranks = degree.shape[2]
    num_pairs, edges = num_ranks * num_ranks, 0
    for i in range(len(keys)):
        if i == 0 or keys[i] != keys[i - 1]:
            stage, pair = keys[i] // num_pairs, keys[i] % num_pairs
            src[edges], dst[edges] = pair // num_ranks, pair % num_ranks
            degree[stage, 0, src[edges]] += 1
            degree[stage, 1, dst[edges]] += 1
            edges += 1
            borders[stage + 1] = edges
        edge_of[by_key[i]] = edges - 1
    for stage in range(len(num_rounds)):
        borders[stage + 1] = max(borders[stage], borders[stage + 1])
        for edge in range(borders[stage], borders[stage + 1]):
            colours[edge] = first
            busiest = max(degree[stage, 0, src[edge]], degree[stage, 1, dst[edge]])
            num_rounds[stage] = max(num_rounds[stage], busiest)
        first += num_rounds[stage]
