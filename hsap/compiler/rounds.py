"""Rounds: the transfers of a stage dealt to batched point-to-point groups.

In one round every rank sends to at most one rank and receives from at most one (HSAP §3.2: a batched call covers the
whole group without conflicts). That is an edge colouring of the bipartite graph senders × receivers; König: as many
colours as the busiest rank has partners are enough, and alternating paths find them.
"""

from __future__ import annotations

import numpy as np


def colour(src: np.ndarray, dst: np.ndarray, num_ranks: int) -> np.ndarray:
    """Colour the edges src -> dst so that equal colours share no sender and no receiver: int64 [num_edges].

    Edges are distinct. Uses exactly the largest degree's number of colours, and is deterministic.
    """
    edges = list(zip(src.tolist(), dst.tolist()))
    degree = np.zeros((2, num_ranks), np.int64)
    np.add.at(degree[0], src, 1)
    np.add.at(degree[1], dst, 1)
    num_colours = int(degree.max(initial=0))
    all_free = (1 << num_colours) - 1
    free = [[all_free] * num_ranks, [all_free] * num_ranks]
    partner: list[list[dict[int, int]]] = [[{} for _ in range(num_ranks)] for _ in range(2)]
    for u, v in edges:
        both = free[0][u] & free[1][v]
        if both:
            c = (both & -both).bit_length() - 1
        else:
            c = (free[0][u] & -free[0][u]).bit_length() - 1
            other = (free[1][v] & -free[1][v]).bit_length() - 1
            _flip(free, partner, v, c, other)
        partner[0][u][c], partner[1][v][c] = v, u
        free[0][u] &= ~(1 << c)
        free[1][v] &= ~(1 << c)
    colour_of = {(u, v): c for u in range(num_ranks) for c, v in partner[0][u].items()}
    return np.array([colour_of[edge] for edge in edges], dtype=np.int64)


def _flip(free, partner, receiver: int, a: int, b: int) -> None:
    """Swap colours a and b on the alternating path that leaves `receiver` by a, so that a becomes free there."""
    side, node, wanted = 1, receiver, a
    path = []
    while wanted in partner[side][node]:
        nearby = partner[side][node][wanted]
        path.append((node, nearby, wanted) if side == 0 else (nearby, node, wanted))
        side, node, wanted = 1 - side, nearby, b if wanted == a else a
    for u, v, c in path:
        del partner[0][u][c], partner[1][v][c]
        free[0][u] |= 1 << c
        free[1][v] |= 1 << c
    for u, v, c in path:
        c = b if c == a else a
        partner[0][u][c], partner[1][v][c] = v, u
        free[0][u] &= ~(1 << c)
        free[1][v] &= ~(1 << c)


def assign_rounds(stage: np.ndarray, src: np.ndarray, dst: np.ndarray, num_ranks: int, first: int) -> np.ndarray:
    """Number the rounds of all transfers, rising with the stage from `first`: int64 [num_transfers].

    All that goes from one rank to another in one stage travels in one round.
    """
    rounds = np.zeros(len(stage), np.int64)
    for s in np.unique(stage):
        here = np.flatnonzero(stage == s)
        pair, index = np.unique(src[here] * num_ranks + dst[here], return_inverse=True)
        colours = colour(pair // num_ranks, pair % num_ranks, num_ranks)
        rounds[here] = first + colours[index]
        first += int(colours.max(initial=-1)) + 1
    return rounds
